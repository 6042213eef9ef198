"""Weights from a folder in Hugging Face layout: one safetensors file, or several with an index."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import ModelError
from headway.models.config import read_json
from headway.models.weights import Weights, refuse_pickle

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsWeights(Weights):
    """The tensors of a folder's safetensors files, read one at a time.

    Raises:
        ModelError: no safetensors there (a pickle is not read in its place), or a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder
        self._files = {name: _open(folder / name) for name in sorted(_file_names(folder))}
        self._where = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"cannot read tensor {name} of {self.source / self._where[name]}: {error}") from None
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"{self.source}: tensor {name} is stored as {tensor.dtype}; headway reads float32, float16 and bfloat16"
            )
        return tensor


def _file_names(folder: Path) -> set[str]:
    if (folder / _INDEX).exists():
        names = set(read_json(folder / _INDEX).get("weight_map", {}).values())
        if not names or any(Path(name).name != name for name in names):
            raise ModelError(f"{folder / _INDEX} is damaged: its weight_map must name files of the same folder")
        return names
    if (folder / _SINGLE).exists():
        return {_SINGLE}
    for path in sorted(folder.iterdir()):
        refuse_pickle(path)
    raise ModelError(f"{folder} has no weights: there is neither {_SINGLE} nor {_INDEX}")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: {path.parent / _INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}. It may be truncated: fetch it again.") from None
