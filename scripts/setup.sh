#!/usr/bin/env bash
# Makes the virtual environment $1 with headway and its tools in it, at the releases that constraints.txt names.
# Whatever goes wrong ends in one line that says what to do.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
need_mib=3000

fail() {
    echo "setup: $*" >&2
    exit 1
}

# The first interpreter that really runs (a shim may exist without one behind it) and is new enough.
find_python() {
    local candidate found
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    found=$("${PYTHON:-python3}" --version 2>/dev/null) || found="not there"
    fail "headway needs Python 3.11 or newer, and ${PYTHON:-python3} is $found. Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

free_mib() { df -Pm . | awk 'NR == 2 {print $4}'; }

# pip's own words go to the terminal, its complaints are kept in memory (a full disk takes no log) and put into one line.
pip_install() {
    local complaints
    { complaints=$("$venv/bin/python" -m pip --disable-pip-version-check --retries 2 install "$@" 2>&1 >&3); } 3>&1 && return
    case $complaints in
    *"No space left on device"* | *"Errno 28"* | *"Disk quota exceeded"*)
        fail "the disk is full ($(free_mib) MiB free here, $(df -Pm "${TMPDIR:-/tmp}" | awk 'NR == 2 {print $4}') MiB in ${TMPDIR:-/tmp}; about $need_mib MiB are needed). Make room and run make setup again." ;;
    *"NewConnectionError"* | *"NameResolutionError"* | *"ConnectTimeout"* | *"ReadTimeout"* | *"ProxyError"* | *"SSLError"* | *"name resolution"* | *"Network is unreachable"* | *"Connection refused"*)
        fail "the package index could not be reached. Check the network (pip config list shows what pip uses) and run make setup again." ;;
    *)
        fail "pip could not install $*: $(grep -m 1 'ERROR' <<<"$complaints" || tail -n 1 <<<"$complaints")" ;;
    esac
}

python=$(find_python) || exit 1
[ "$(free_mib)" -ge "$need_mib" ] || [ -x "$venv/bin/python" ] ||
    fail "the disk is nearly full: $(free_mib) MiB free in $PWD, about $need_mib MiB are needed. Make room and run make setup again."

if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    rm -rf "$venv"
    complaints=$("$python" -m venv "$venv" 2>&1) ||
        fail "$python could not make a virtual environment: $(grep -m 1 -i -E 'space left|ensurepip|error' <<<"$complaints"). On Debian or Ubuntu: apt install python3-venv"
fi
echo "setup: $("$venv/bin/python" --version) in $venv"
# torch first and alone, so that the constraint picks the build: a CPU one wherever the index offers it.
pip_install torch -c constraints.txt
pip_install -e '.[dev,native]' -c constraints.txt
scripts/build_native.sh "$venv" || echo "setup: going on without the native kernels: torch computes in their place, more slowly"
echo "setup: done"
