"""What a model's files say of its text: the tokenizer, the ids that begin and end, the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from headway.core.errors import ModelError
from headway.engine.chat import ChatTemplate
from headway.engine.gguf_tokenizer import special_id, tokenizer_from_gguf
from headway.models.config import read_json
from headway.models.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """See Tokenizer, which is made of it."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Those of a folder in Hugging Face layout or of a .gguf file.

    Raises:
        ModelError: none there, damaged, or of a kind that is not supported.
    """
    files = _from_folder(path) if path.is_dir() else _from_gguf(path)
    files.backend.no_truncation()
    files.backend.no_padding()
    return files


def _from_gguf(path: Path) -> TokenizerFiles:
    metadata = GgufFile(path).metadata
    try:
        return _from_metadata(metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _from_metadata(metadata: Mapping[str, Any]) -> TokenizerFiles:
    backend = tokenizer_from_gguf(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {name: tokens[i] for n, name in names.items() if (i := special_id(metadata, n)) is not None}
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": source
        for key, source in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    ends = [special_id(metadata, name) for name in ("eos", "eot", "eom")]
    return TokenizerFiles(
        backend,
        bos_token_id=special_id(metadata, "bos"),
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        chat_template=ChatTemplate(templates, special) if "default" in templates else None,
    )


def _from_folder(folder: Path) -> TokenizerFiles:
    config = _optional_json(folder / "tokenizer_config.json")
    if "auto_map" in config:
        raise ModelError(f"{folder}: its tokenizer needs code that it ships; headway runs no code from a model")
    backend = _folder_backend(folder)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := _token_text(config.get(name))) is not None}
    model = _optional_json(folder / "config.json")
    ends = _optional_json(folder / "generation_config.json").get("eos_token_id", model.get("eos_token_id"))
    eos = [backend.token_to_id(special.get("eos_token", "")), *(ends if isinstance(ends, list) else [ends])]
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else model.get("bos_token_id")
    templates = _folder_templates(folder, config)
    return TokenizerFiles(
        backend,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        chat_template=ChatTemplate(templates, special) if "default" in templates else None,
    )


def _folder_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"cannot read {path}: {error}") from None
    from transformers import AutoTokenizer  # slow to import; knows how to convert older files

    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # whatever the files' converter stumbles over
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted: {reason}") from None
    return backend


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": path.read_text(encoding="utf-8")}
    templates = config.get("chat_template")
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {"default": templates} if templates else {}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token
