"""`headway generate` writes what the library generates, and nothing else, to standard output."""

from __future__ import annotations

import subprocess
import sys

from headway import LLM, SamplingParams

COMMAND = [sys.executable, "-m", "headway.cli.main", "generate"]
ENGINE = ["--dtype", "float32", "--kv-cache-memory", "100M", "--threads", "1"]


def test_the_text_is_the_library_s():
    prompt = "Trains are\n"
    sampling = ["--max-tokens", "12", "--temperature", "0.9", "--top-k", "50", "--seed", "5", "--system", "Be brief."]
    done = subprocess.run(
        [*COMMAND, *ENGINE, *sampling], input=prompt, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=50, seed=5)
    with LLM("smollm2", dtype="float32", kv_cache_memory=100_000_000, threads=1) as llm:
        (completion,) = llm.chat(messages, params, use_tqdm=False)
    (output,) = completion.outputs
    assert done.stdout == output.text + "\n"
    assert f"{len(completion.prompt_token_ids)} prompt tokens, {len(output.token_ids)} output tokens" in done.stderr
    assert "seed 5" in done.stderr


def test_a_prompt_that_is_too_long_is_one_line():
    flags = ["--max-model-len", "16", "--quiet"]
    done = subprocess.run(
        [*COMMAND, *ENGINE, *flags, "word " * 50], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("headway generate: ")
    assert done.stderr.count("\n") == 1
