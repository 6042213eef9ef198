"""Models: their shape, their weights, their forward pass. Importing this imports no torch; `load` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import ModelError

if TYPE_CHECKING:
    import torch

    from headway.models.config import ModelConfig
    from headway.models.llama import DecoderModel
    from headway.models.weights import Weights

__all__ = ["ModelError", "load", "open_model"]


def load(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> DecoderModel:
    """The model of a folder in Hugging Face layout or of a .gguf file, its weights in `dtype` on `device`.

    Raises:
        ModelError: missing or damaged files, an architecture or a tensor type that headway does not run, a pickle.
    """
    from headway.models.llama import DecoderModel

    return DecoderModel(*open_model(path), dtype, device)


def open_model(path: str | Path) -> tuple[ModelConfig, Weights]:
    """The shape of a model and its tensors, none of which is read yet.

    Raises:
        ModelError: as `load`.
    """
    from headway.models.config import config_from_gguf, load_config
    from headway.models.weights import refuse_pickle

    path = Path(path)
    refuse_pickle(path)
    if path.is_dir():
        from headway.models.safetensors import SafetensorsWeights

        return load_config(path), SafetensorsWeights(path)
    from headway.models.gguf import GgufFile
    from headway.models.gguf_weights import GgufWeights

    file = GgufFile(path)
    config = config_from_gguf(file)
    return config, GgufWeights(file, config)
