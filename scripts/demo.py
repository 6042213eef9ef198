"""`make demo`: serve the embedded model, send it 64 ShareGPT requests at concurrency 16, print the table, stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

HEADWAY = [sys.executable, "-m", "headway.cli.main"]
OUTPUT_LEN = 64
"""ShareGPT's answers are about 220 tokens long; cut to this the demo ends in minutes on two cores."""
START_SECONDS = 600
"""The first start downloads the model."""


@contextmanager
def server() -> Iterator[str]:
    """A server on a free port, as its URL. However the block ends, no process is left."""
    command = [*HEADWAY, "serve", "--port", "0"]
    # A group of its own: Ctrl-C comes to this process, which then stops the server in order.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    url: list[str] = []
    settled = Event()
    Thread(target=_follow, args=(process, url, settled), daemon=True).start()
    try:
        if not settled.wait(START_SECONDS) or not url:
            raise SystemExit("demo: the server did not start; the lines above say why")
        yield url[0]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(process: subprocess.Popen[str], url: list[str], settled: Event) -> None:
    """Pass the server's lines on, and note its URL when it says that it serves."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        if serving := re.match(r"headway serves .* at (http://\S+)/v1", line):
            url.append(serving[1])
            settled.set()
    settled.set()


def main() -> int:
    """Run the demo; returns the load test's exit status."""
    with server() as url:
        print(f"Sending 64 ShareGPT requests at concurrency 16, answers cut to {OUTPUT_LEN} tokens.", flush=True)
        load = ["--num-prompts", "64", "--concurrency", "16", "--output-len", str(OUTPUT_LEN), "--ignore-eos"]
        return subprocess.run(
            [*HEADWAY, "bench", "--base-url", url, "--dataset", "sharegpt", *load], check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
