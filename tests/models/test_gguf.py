"""GGUF files: every tensor type and variant against transformers' reading; damage and the unknown are refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM

from headway.engine.text import Tokenizer
from headway.models import ModelError, load
from headway.models.config import LinearRope, load_config
from headway.models.gguf import GgufFile
from tests import ggufs, naive

IDS = torch.randint(0, ggufs.VOCABULARY, (100,), generator=torch.Generator().manual_seed(1)).tolist()


def expected_logits(path: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    with torch.inference_mode():
        return reference(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_every_tensor_type_gives_the_logits_of_transformers(kind, tmp_path):
    path = ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors(tied=kind != Kind.Q8_0), kind=kind)
    ours = naive.logits(load(path, torch.float32), IDS)
    torch.testing.assert_close(ours, expected_logits(path), rtol=1e-4, atol=1e-4)


def test_biases_and_the_scaling_of_llama_3(tmp_path):
    """A model in Hugging Face layout, converted as llama.cpp converts: q and k permuted, rope's factors a tensor."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=ggufs.VOCABULARY,
        hidden_size=ggufs.HIDDEN,
        intermediate_size=ggufs.INNER,
        num_hidden_layers=ggufs.LAYERS,
        num_attention_heads=ggufs.HEADS,
        num_key_value_heads=ggufs.KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope,
    )
    reference = LlamaForCausalLM(config)
    tensors = ggufs.llama_tensors(bias=True)
    state = {hugging_face_name(name): unpermuted(name, torch.from_numpy(values)) for name, values in tensors.items()}
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = plain / reference.model.rotary_emb.inv_freq.numpy()
    path = ggufs.write(tmp_path / "tiny.gguf", tensors | {"rope_freqs.weight": factors.astype(np.float32)})
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(naive.logits(load(path, torch.float32), IDS), expected, rtol=1e-4, atol=1e-4)


def hugging_face_name(name: str) -> str:
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    *layer, module, kind = name.split(".")
    return ".".join([*(["model", "layers", layer[1]] if layer else []), names[module], kind])


def unpermuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp puts row (half h, pair p) of a head at 2 p + h."""
    heads = {"attn_q": ggufs.HEADS, "attn_k": ggufs.KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    length = len(tensor) // heads
    rows = [head * length + 2 * p + h for head in range(heads) for h in (0, 1) for p in range(length // 2)]
    return tensor[rows]


def test_config_from_metadata(tmp_path):
    own = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.attention.sliding_window": 128}
    config = load_config(ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors(tied=False), own))
    assert config.rope_scaling == LinearRope(4.0)
    assert config.max_position_embeddings == 128
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (2, 7)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scale_linear": 2.0}, LinearRope(2.0)),
    ],
)
def test_rope_scaling_from_metadata(metadata, expected, tmp_path):
    assert load_config(ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors(), metadata)).rope_scaling == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "falcon"}, "architecture 'falcon' is not supported; of GGUF architectures"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.dimension_count": 8}, "rotary embedding of 8 of 16 dimensions"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.block_count": 3}, r"no tensor model\.layers\.2"),
        ({"llama.vocab_size": 321}, r"shape \[320, 64\], but its config asks for \[321, 64\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(metadata, message, tmp_path):
    path = ggufs.write(
        tmp_path / "tiny.gguf",
        ggufs.llama_tensors(),
        {k: v for k, v in metadata.items() if k != "general.architecture"},
        architecture=metadata.get("general.architecture", "llama"),
    )
    with pytest.raises(ModelError, match=message):
        load(path, torch.float32)


def test_other_tensor_types_are_refused_by_name(tmp_path):
    path = ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors(), kind=Kind.Q5_0)
    with pytest.raises(ModelError, match=r"is stored as Q5_0, which headway does not read. It reads F32, F16, Q4_0"):
        load(path, torch.float32)


def test_a_file_without_a_needed_key(tmp_path):
    path = ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors())
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cramp"))
    with pytest.raises(ModelError, match=r"tiny\.gguf: the config lacks block_count"):
        load(path, torch.float32)


def test_missing_empty_and_foreign_files(tmp_path):
    for content, message in [
        (None, "there is no file"),
        (b"", "cannot read"),
        (b"PK\x03\x04" * 9, "is not a GGUF file"),
    ]:
        path = tmp_path / "model.gguf"
        if content is not None:
            path.write_bytes(content)
        for read in (load_config, Tokenizer.load):
            with pytest.raises(ModelError, match=message):
                read(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelError, match="GGUF version 1"):
        load_config(path)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", ggufs.llama_tensors())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_off_anywhere_is_reported_as_truncated(tiny_gguf, data):
    whole = tiny_gguf.read_bytes()
    end = data.draw(st.integers(4, len(whole) - 1).filter(lambda n: n < 4000 or n % 7 == 0))
    cut = tiny_gguf.with_name("cut.gguf")
    cut.write_bytes(whole[:end])
    with pytest.raises(ModelError, match="is truncated"):
        load(cut, torch.float32)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 1500), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_an_error_or_harmless(tiny_gguf, at, value):
    """Never a crash, a hang, or another exception."""
    whole = tiny_gguf.read_bytes()
    damaged = tiny_gguf.with_name("damaged.gguf")
    damaged.write_bytes(whole[:at] + value + whole[at + len(value) :])
    with contextlib.suppress(ModelError):
        load(damaged, torch.float32)


@pytest.mark.slow
def test_the_embedded_file_reads_as_the_gguf_package_reads_it(embedded_gguf):
    assert_read_alike(embedded_gguf)


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(tmp_path):
    metadata = {
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.1,
        "a.text": "naïve\n🙂",
        "a.texts": ["", "x", "漢字"],
        "a.ints": [-1, 2**30],
        "a.floats": [0.5, -1e-9],
        "a.bools": [True, False],
        "general.alignment": 64,
    }
    assert_read_alike(ggufs.write(tmp_path / "tiny.gguf", ggufs.llama_tensors(bias=True), metadata, kind=Kind.Q4_1))


def assert_read_alike(path: Path) -> None:
    ours, theirs = GgufFile(path), GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (own.start, own.num_bytes) == (tensor.data_offset, tensor.n_bytes)
