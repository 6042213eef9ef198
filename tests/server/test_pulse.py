"""The line a second and the advice under it: what a person reads when things go well, and when they do not."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from headway.core.config import SchedulerConfig
from headway.server.pulse import LONG, SILENCE, Advice, Beat
from tests.core.memory import World
from tests.server.conftest import Server

CONFIG = SchedulerConfig(max_batch_size=32)
IDLE = World(CONFIG).loop.stats()
BUSY = replace(
    IDLE,
    num_running=32,
    num_waiting=5,
    waiting_by_reason={"wait_blocks": 2, "wait_row": 3},
    kv_usage=0.41,
    kv_fragmentation=0.12,
    num_steps=20,
    num_batched_rows=500,
    num_batched_tokens=1612,
    host_gap=0.03,
)


def beat(**facts) -> Beat:
    return Beat.between(IDLE, replace(BUSY, **facts), generated=412, seconds=1.0)


def test_the_line() -> None:
    assert beat().line(32) == (
        "running 32 waiting 5 (row 3, blocks 2) | 412 tok/s out, 1.2k in"
        " | batch 78% kv 41% frag 12% pad 0% gap 3% preempted 0"
    )
    paused = beat(paused_by_reason={"wait_policy": 2}).line(32)
    assert paused.startswith("running 32 (policy 2) waiting 5 (row 3, blocks 2) |")
    lost = beat(num_preemptions=2, num_recomputed_tokens=1310, num_pad_tokens=1612).line(32)
    assert lost.endswith("pad 50% gap 3% preempted 2 (1.3k tokens again)")
    assert "batch - " in Beat.between(BUSY, BUSY, 0, 1.0).line(32)


def told(times: int = LONG, config: SchedulerConfig = CONFIG, block_size: int = 16, **facts) -> list[str]:
    """What is said in so many beats of these facts, one a second."""
    advice = Advice()
    return [text for now in range(times) for text in advice.note(beat(**facts), config, block_size, float(now))]


FEW = {"num_batched_rows": 200}
"""200 rows in 20 steps of 32."""


@pytest.mark.parametrize(
    ("reason", "limit", "remedy"),
    [
        ("wait_row", "max_num_seqs", "raise --max-num-seqs"),
        ("wait_row", "burst_size", "raise --burst-size"),
        ("wait_row", "max_batch_size", "raise --max-num-batched-tokens"),
        ("wait_blocks", "", "raise --kv-cache-memory"),
        ("wait_budget", "max_num_batched_tokens", "raise --max-num-batched-tokens"),
        ("wait_budget", "tpot_slo", "raise --tpot-slo-ms"),
        ("wait_window", "", "use --batching inflight"),
    ],
)
def test_a_half_empty_batch_while_somebody_waits(reason: str, limit: str, remedy: str) -> None:
    (said,) = told(**FEW, waiting_by_reason={reason: 5}, queue_limit=limit)
    assert said.startswith(f"batch efficiency 31%, while 5 wait ({reason.removeprefix('wait_')}): {remedy}")


def test_what_is_no_fault_is_not_blamed() -> None:
    assert told() == []
    assert told(**FEW, num_waiting=0, waiting_by_reason={}) == [], "there is not more to do"
    assert told(LONG - 1, **FEW, waiting_by_reason={"wait_row": 5}) == [], "a short lull"
    assert told(**FEW, waiting_by_reason={"wait_policy": 5}) == [], "no limit would let them in"
    assert told(kv_fragmentation=0.6) == [], "most blocks are free"
    assert told(100, num_steps=0) == [], "nothing was computed"


def test_fragmentation_and_padding() -> None:
    (said,) = told(kv_fragmentation=0.6, kv_usage=0.9, block_size=64)
    assert "60%" in said
    assert "lower --block-size, now 64" in said
    static = replace(CONFIG, batching="static")
    said = " ".join(told(config=static, kv_fragmentation=0.6, kv_usage=0.9, num_pad_tokens=1612))
    assert "a padded group holds room for the longest" in said
    assert "50% of the computed tokens are padding: use --batching inflight, or --length-clusters" in said


def test_the_same_advice_at_most_once_a_minute() -> None:
    facts = FEW | {"waiting_by_reason": {"wait_blocks": 5}}
    assert len(told(LONG + int(SILENCE) - 1, **facts)) == 1
    assert len(told(LONG + int(SILENCE), **facts)) == 2


def test_a_server_that_works_says_so_on_standard_error(tiny_model_dir: Path) -> None:
    """It is silent by itself, as other tests see."""
    server = Server(tiny_model_dir, step=0.02, settings="status_line=True").wait_ready()
    body = {"prompt": [5, 6, 7], "max_tokens": 80, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    server.signal(signal.SIGTERM)
    status, errors = server.stop()
    assert status == 0
    lines = errors.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"running \d+.* waiting \d+.* \| [\d.k]+ tok/s out, [\d.k]+ in"
            r" \| batch [\d%-]+ kv \d+% frag -?\d+% pad [\d%-]+ gap \d+% preempted 0",
            line,
        ), line
