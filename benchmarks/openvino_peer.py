"""OpenVINO GenAI's continuous batching in process, for peers.py: reads loads as JSON lines, answers with samples.

Run by an interpreter that has openvino_genai. At its strongest known setting: bfloat16 arithmetic, two threads, latency
hint, 2,048 batched tokens, dynamic split-fuse, prefix caching off.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def make_pipeline(folder):
    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = 4, 2048, 128
    config.enable_prefix_caching, config.dynamic_split_fuse = False, True
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 2}
    return genai.ContinuousBatchingPipeline(folder, config, "CPU", hints)


class Live:
    """A request under way."""

    def __init__(self, pipeline, number, request, due):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["output_len"]
        config.ignore_eos, config.do_sample = True, False
        ids = ov.Tensor(np.array([request["prompt"]], np.int64))
        self.handle = pipeline.add_request(number, ids, config)
        self.due, self.wanted, self.count, self.first, self.last = due, request["output_len"], 0, None, None

    def read(self, now):
        while self.handle.can_read():
            tokens = sum(len(output.generated_ids) for output in self.handle.read().values())
            if tokens and self.first is None:
                self.first = now
            self.count, self.last = self.count + tokens, now

    @property
    def ended(self):
        return self.count >= self.wanted or self.handle.get_status() != genai.GenerationStatus.RUNNING


def drive(pipeline, order, numbers):
    """All requests of `order`, in a closed loop of users or as they fall due."""
    pending, live, done = list(order["requests"]), [], []
    arrivals, began = order["arrivals"], time.perf_counter()
    while pending or live:
        now = time.perf_counter()
        while pending:
            due = now if arrivals is None else began + arrivals[len(order["requests"]) - len(pending)]
            if due > now or (arrivals is None and len(live) >= order["users"]):
                break
            live.append(Live(pipeline, next(numbers), pending.pop(0), due))
        if not live:
            time.sleep(0.001)
            continue
        pipeline.step()
        now = time.perf_counter()
        for request in live:
            request.read(now)
        done += [request for request in live if request.ended]
        live = [request for request in live if not request.ended]
    good = [request for request in done if request.first is not None]
    return {
        "seconds": max(request.last for request in good) - began,
        "output_tokens": sum(request.count for request in good),
        "ttft": [request.first - request.due for request in good],
        "tpot": [
            (request.last - request.first) / (request.count - 1) if request.count > 1 else float("nan")
            for request in good
        ],
        "failed": len(done) - len(good),
        "short": sum(request.count < request.wanted for request in good),
    }


def main():
    pipeline, numbers = make_pipeline(sys.argv[1]), iter(range(10**9))
    for line in sys.stdin:
        print(json.dumps(drive(pipeline, json.loads(line), numbers)), flush=True)


if __name__ == "__main__":
    main()
