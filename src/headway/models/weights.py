"""A checkpoint's tensors by their Hugging Face names, whatever file they lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from headway.core.errors import ModelError


class Weights(ABC):
    """Tensors by name. `source` is what messages call it."""

    source: Path

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str) -> Tensor: ...

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, on the CPU, in a float dtype that holds what is stored.

        Raises:
            ModelError: it is missing, or its shape is not `shape`.
        """
        if name not in self:
            raise ModelError(f"{self.source} has no tensor {name}: the checkpoint is incomplete")
        if (stored := self._shape(name)) != shape:
            raise ModelError(
                f"{self.source}: tensor {name} has shape {list(stored)}, but its config asks for {list(shape)}"
            )
        return self._read(name)


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of checkpoints that run code when they are read."""


def refuse_pickle(path: Path) -> None:
    """Raises ModelError for a file that only pickle can read."""
    if path.suffix.lower() in PICKLES:
        raise ModelError(
            f"{path} is a pickle file, and reading one can run any code in it: headway reads safetensors and GGUF only"
        )
