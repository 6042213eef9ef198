"""A decoder's shape, from Hugging Face's config.json or from GGUF metadata. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ModelError
from headway.models.gguf import GgufFile

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)

_EXTENTS = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
_LARGEST = 10_000_000  # of any extent: beyond it the file is damaged, and tables would fill the memory


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearRope | Llama3Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-architecture decoder; names are those of Hugging Face's config.json.

    `max_position_embeddings` is the longest sequence in tokens; where a model has a sliding window it is no longer than
    the window, within which full attention is the same. `attention_bias` is that of q, k and v.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_EXTENTS, "max_position_embeddings"):
            if not 1 <= getattr(self, name) <= _LARGEST:
                raise ModelError(f"the model's {name} is {getattr(self, name)}, which makes no sense")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model's num_heads ({self.num_heads}) is no multiple of its num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"the model's head_dim ({self.head_dim}) is odd: rotary embedding needs pairs")


def load_config(path: str | Path) -> ModelConfig:
    """The config of a folder in Hugging Face layout or of a .gguf file.

    Raises:
        ModelError: nothing there, unreadable, or an architecture or feature that headway does not run.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    return config_from_gguf(GgufFile(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: no such file, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a model in Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _from_folder(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    try:
        return config_from_hf(raw | ({} if eos is None else {"eos_token_id": eos}))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The config that the object in a config.json describes, in the layout of transformers 4 or 5."""
    _refuse_unsupported(raw)
    hidden, heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
    positions = _int(raw, "max_position_embeddings")
    theta, scaling = _hf_rope(raw)
    attention_bias = bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=raw["architectures"][0],
        num_layers=_int(raw, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_int(raw, "num_key_value_heads", heads),
        head_dim=_int(raw, "head_dim", hidden // max(heads, 1)),
        intermediate_size=_int(raw, "intermediate_size"),
        vocab_size=_int(raw, "vocab_size"),
        max_position_embeddings=min(positions, _int(raw, "sliding_window", positions)),
        rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias")),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    architecture = (raw.get("architectures") or [None])[0]
    if "auto_map" in raw:
        raise ModelError(
            f"{architecture} needs code that it ships (auto_map in config.json); headway runs no code from a model"
        )
    if architecture not in HF_ARCHITECTURES:
        raise ModelError(f"architecture {architecture} is not supported; headway runs {', '.join(HF_ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ModelError(
            f"the checkpoint is quantised ({method}); headway reads float32, float16 and bfloat16 safetensors, or GGUF"
        )


def _hf_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = _float(rope, "rope_theta", _float(raw, "rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if _float(rope, "partial_rotary_factor", _float(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(_float(rope, "factor"))
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=_float(rope, "factor"),
            low_freq_factor=_float(rope, "low_freq_factor"),
            high_freq_factor=_float(rope, "high_freq_factor"),
            original_max_position_embeddings=_int(rope, "original_max_position_embeddings"),
        )
    raise ModelError(f"rope type {kind!r} is not supported; headway runs default, linear and llama3")


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The config that a GGUF file's metadata and tensor names describe."""
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; of GGUF architectures headway runs "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    own = {k.removeprefix(f"{architecture}."): v for k, v in meta.items() if k.startswith(f"{architecture}.")}
    try:
        return _gguf_fields(architecture, own, meta, file)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None


def _gguf_fields(architecture: str, own: Mapping[str, Any], meta: Mapping[str, Any], file: GgufFile) -> ModelConfig:
    if own.get("expert_count"):
        raise ModelError(f"a mixture of {own['expert_count']} experts is not supported")
    hidden, heads = _int(own, "embedding_length"), _int(own, "attention.head_count")
    head_dim = _int(own, "attention.key_length", hidden // max(heads, 1))
    if (rotated := _int(own, "rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"rotary embedding of {rotated} of {head_dim} dimensions is not supported")
    if _int(own, "attention.value_length", head_dim) != head_dim:
        raise ModelError("values and keys of different lengths are not supported")
    context = _int(own, "context_length")
    eos = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        num_layers=_int(own, "block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_int(own, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_int(own, "feed_forward_length"),
        vocab_size=_int(own, "vocab_size", len(meta.get("tokenizer.ggml.tokens") or ())),
        max_position_embeddings=min(context, _int(own, "attention.sliding_window", context)),
        rms_norm_eps=_float(own, "attention.layer_norm_rms_epsilon"),
        rope_theta=_float(own, "rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(own),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_ids([i for i in eos if i is not None]),
    )


def _gguf_rope_scaling(own: Mapping[str, Any]) -> RopeScaling | None:
    """Llama 3's scaling is not in the metadata: such files carry its factors as the tensor rope_freqs."""
    kind = own.get("rope.scaling.type", "linear")  # as llama.cpp takes it, for older files that give a factor alone
    factor = _float(own, "rope.scaling.factor", _float(own, "rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} is not supported; in a GGUF headway runs none and linear")
    return LinearRope(factor) if factor != 1.0 and kind == "linear" else None


def _int(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise ModelError(f"the config lacks {name}")
    if not isinstance(value, int):
        raise ModelError(f"the config's {name} must be an integer, not {value!r}")
    return value


def _float(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise ModelError(f"the config lacks {name}")
    if not isinstance(value, int | float):
        raise ModelError(f"the config's {name} must be a number, not {value!r}")
    return float(value)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))
