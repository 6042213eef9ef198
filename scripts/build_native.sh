#!/usr/bin/env bash
# Builds the native kernels of csrc/ with the tools of the virtual environment $1, next to the code that imports them.
# Where that cannot be done it says why in one line and fails; whatever an earlier build left is then removed.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${1:-.venv}" && pwd) || exit 1
target=src/headway/kernels
python=$venv/bin/python

fail() {
    rm -f $target/_native*.so
    echo "native kernels: $*" >&2
    exit 1
}

compiler=
for candidate in ${CXX:-c++ g++ clang++}; do
    compiler=${compiler:-$(command -v "$candidate")}
done
[ -n "$compiler" ] ||
    fail "not built, there is no C++ compiler (on Debian or Ubuntu: apt install g++; then make setup)"
build=build/native-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
log=$build/build.log
mkdir -p "$build"
CXX=$compiler PATH=$venv/bin:$PATH cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$python" >"$log" 2>&1 &&
    PATH=$venv/bin:$PATH cmake --build "$build" >>"$log" 2>&1 ||
    fail "not built: $(grep -m 1 -iE 'error' "$log" || tail -n 1 "$log") (all of it is in $log)"
cp "$build"/_native*.so $target/ && echo "native kernels: built"
