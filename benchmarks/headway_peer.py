"""headway's engine in process, for peers.py: reads loads as JSON lines, answers with samples.

Arguments: MODEL and flags of `headway serve` that say how it is loaded.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from headway.cli.engine_flags import add_engine_arguments, engine_config
from headway.engine.resolve import resolve_model
from headway.lab.compare import Live
from headway.lab.traffic import Arrival


def sample(live: Live, config: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Serves a load to its end."""
    arrivals = order["arrivals"]
    traffic = [
        Arrival(at=arrivals[i] if arrivals else 0.0, prompt=request["prompt"], output_len=request["output_len"])
        for i, request in enumerate(order["requests"])
    ]
    run = live(config, traffic, users=None if arrivals else order["users"])
    return {
        "seconds": run.duration,
        "output_tokens": run.output_tokens,
        "ttft": [one.ttft for one in run.served],
        "tpot": [one.tpot if one.output_len > 1 else math.nan for one in run.served],
        "failed": 0,
        "short": sum(one.output_len < one.request.output_len for one in run.served),
    }


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    add_engine_arguments(parser)
    config = engine_config(parser.parse_args())
    limits = replace(config.scheduler, max_batch_size=128, max_num_seqs=128, prefix_caching=False)
    live = Live(replace(config, scheduler=limits), str(resolve_model(config.model)))
    for line in sys.stdin:
        print(json.dumps(sample(live, limits, json.loads(line))), flush=True)


if __name__ == "__main__":
    # On one thread from loading to the last step: two teams of OpenMP threads in a process halve its speed.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(serve).result()
