"""Folders in Hugging Face layout: every variant that is supported against transformers, the others refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from headway.models import ModelError, load
from headway.models.config import config_from_hf, load_config
from tests import naive

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "untied heads": {},
    "tied heads": {"tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads as heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "large eps": {"rms_norm_eps": 0.1},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
}


def save(model: torch.nn.Module, folder: Path, **options: str) -> None:
    """With random values wherever transformers begins with zeros or ones, so that nothing is left out unseen."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, **options)


def assert_same_logits(folder: Path, reference: torch.nn.Module) -> None:
    ids = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(naive.logits(load(folder, torch.float32), ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**SHAPE | VARIANTS[variant]))
    save(reference, tmp_path)
    assert_same_logits(tmp_path, reference)


def test_weights_in_several_files_with_an_index(tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**SHAPE))
    save(reference, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(tmp_path, reference)


def test_mistral_within_its_window(tmp_path):
    reference = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=220, head_dim=16))
    save(reference, tmp_path)
    assert load_config(tmp_path).max_position_embeddings == 220
    assert_same_logits(tmp_path, reference)


def test_half_precision_files_are_widened(tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    save(reference, tmp_path)
    assert_same_logits(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_rope_in_the_layout_of_transformers_4():
    raw = SHAPE | {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0}
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    new = config_from_hf(raw | {"rope_parameters": LLAMA3_ROPE})
    assert config_from_hf(raw | {"rope_scaling": scaling}) == new
    old_linear = config_from_hf(raw | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old_linear == config_from_hf(raw | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})


def test_the_end_tokens_of_the_generation_config_count(tiny_model_dir, tmp_path):
    folder = copy(tiny_model_dir, tmp_path)
    assert load_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_config(folder).eos_token_ids == (0, 2)


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported; headway runs LlamaForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "runs no code from a model"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, r"num_heads \(4\) is no multiple of its num_kv_heads \(3\)"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\.input_layernorm\.weight"),
        ({"intermediate_size": 129}, r"gate_proj\.weight has shape \[128, 64\], but its config asks for \[129, 64\]"),
        ({"attention_bias": True}, r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"tie_word_embeddings": False}, r"no tensor lm_head\.weight"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message, tiny_model_dir, tmp_path):
    folder = copy(tiny_model_dir, tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder, torch.float32)


def test_damaged_folders_say_what_is_missing(tiny_model_dir, tmp_path):
    folder = copy(tiny_model_dir, tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="truncated"):
        load(folder, torch.float32)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle file"):
        load(folder, torch.float32)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no weights"):
        load(folder, torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load(folder, torch.float32)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(folder, torch.float32)


def test_a_missing_shard_and_an_index_that_leads_outside(tmp_path):
    save(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        load(tmp_path, torch.float32)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="must name files of the same folder"):
        load(tmp_path, torch.float32)


def test_integer_weights_are_refused(tiny_model_dir, tmp_path):
    folder = copy(tiny_model_dir, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"stored as torch\.int8"):
        load(folder, torch.float32)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickles_are_refused_unread(suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelError, match="pickle"):
        load(path, torch.float32)


def test_sequences_side_by_side_get_what_each_gets_alone(tiny_model_dir):
    model = load(tiny_model_dir, torch.float32)
    prompts = [[5, 6, 7], [8], list(range(100, 140))]
    together, _ = naive.greedy(model, prompts, 12)
    assert together == [naive.greedy(model, [prompt], 12)[0][0] for prompt in prompts]
