"""Whether an answer's timeline accounts for the time that its client saw.

Random requests (lengths, streamed or whole, several choices, stop strings) go over HTTP to the real server and engine
loop, on an executor that takes --step seconds a step. The client is plain sockets. Its network time is what a request
that does nothing (GET /version) takes on the same connection just before.

Bars: every answer lacks at most 2 ms of what the client saw beyond its network time, and the states of each choice sum
to the whole to a microsecond.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from common import Verdict, arguments, measured

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.002
"""Seconds beyond the network time."""
SUM_BAR = 1e-6
START = """
import sys
from headway.core.config import SchedulerConfig
from headway.engine.api import EngineConfig
from headway.server.run import serve
config = EngineConfig({model!r}, scheduler=SchedulerConfig(max_batch_size=8, max_num_seqs=16))
sys.exit(serve(config, port=0, loop_factory="tests.server.scripted:build_loop"))
"""


@dataclass(frozen=True, slots=True)
class Account:
    """Of one answer, in seconds: what the client saw, its network time, what the timeline says, and by how much the
    states of a choice miss the whole at most."""

    seen: float
    network: float
    told: float
    missed: float

    @property
    def lack(self) -> float:
        return self.seen - self.told - self.network


class Connection:
    """HTTP/1.1 on one socket, with as little between as can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        return cls(*await asyncio.open_connection(host, port))

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[bytes, float, float]:
        """The answer's body, and the times of sending and of its last byte."""
        head = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json"]
        head.append(f"content-length: {len(body)}")
        sent = time.monotonic()
        self.writer.write("\r\n".join([*head, "", ""]).encode() + body)
        headers = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert headers.startswith(b"http/1.1 200"), headers
        if b"transfer-encoding: chunked" in headers:
            data = b""
            while size := int(await self.reader.readline(), 16):
                data += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            data = await self.reader.readexactly(int(headers.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return data, sent, time.monotonic()


def request(draw: random.Random) -> dict[str, object]:
    """A random one."""
    body: dict[str, object] = {
        "prompt": [draw.randrange(1000, 30_000) for _ in range(draw.choice((1, 10, 100, 400)))],
        "max_tokens": draw.choice((1, 4, 16, 64)),
        "ignore_eos": True,
        "stream": draw.random() < 0.5,
        "request_class": draw.choice(("realtime", "batch")),
        "priority": draw.randrange(3),
    }
    if draw.random() < 0.2:
        body |= {"prompt": "a few words more " * draw.randrange(1, 40), "stop": "few", "n": draw.choice((1, 2))}
    return body


async def account(connection: Connection, draw: random.Random) -> Account:
    """One request, and what its timeline says of it."""
    body = json.dumps(request(draw)).encode()
    _, begun, ended = await connection.ask("GET", "/version")
    data, sent, received = await connection.ask("POST", "/v1/completions", body)
    first = data.removeprefix(b"data: ").split(b"\n\n")[0]
    document = json.loads((await connection.ask("GET", f"/v1/requests/{json.loads(first)['id']}/timeline"))[0])
    assert document["status"] == "finished"
    missed = max(abs(sum(choice["states"].values()) - document["seconds"]) for choice in document["choices"])
    return Account(received - sent, ended - begun, document["seconds"], missed)


async def load(port: int, args: Namespace) -> list[Account]:
    """All requests, from --users connections."""
    draw, left, accounts = random.Random(args.seed), iter(range(args.requests)), []

    async def user() -> None:
        connection = await Connection.open("127.0.0.1", port)
        for _ in left:
            await asyncio.sleep(draw.expovariate(1 / args.pause))
            accounts.append(await account(connection, draw))
        connection.writer.close()

    await asyncio.gather(*(user() for _ in range(args.users)))
    return accounts


def main(args: Namespace) -> int:
    """Runs the load against a server of its own; returns 1 where a bar is missed."""
    if args.quick:
        args.requests = min(args.requests, 300)
    from headway.engine.resolve import resolve_model

    code = START.format(model=str(resolve_model(None)))
    env = os.environ | {"HEADWAY_TEST_STEP": str(args.step), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    server = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "http://" in line)
        port = int(url.rpartition(":")[2].split("/")[0])
        with measured() as used:
            accounts = asyncio.run(load(port, args))
    finally:
        server.terminate()
        server.wait(30)
    lacks = np.array([one.lack for one in accounts]) * 1000
    within = float((lacks <= BAR * 1000).mean())
    missed = max(one.missed for one in accounts)
    table = Table(title=f"{len(accounts)} answers, milliseconds", title_justify="left")
    for heading in ("", "median", "P99", "max"):
        table.add_column(heading, justify="right")
    for name, values in (
        ("the client saw", np.array([one.seen for one in accounts]) * 1000),
        ("its network time", np.array([one.network for one in accounts]) * 1000),
        ("the timeline says", np.array([one.told for one in accounts]) * 1000),
        ("what the client saw beyond that", np.array([one.seen - one.told for one in accounts]) * 1000),
        ("lacking", lacks),
    ):
        median, p99 = np.percentile(values, [50, 99])
        table.add_row(name, f"{median:.3f}", f"{p99:.3f}", f"{values.max():.3f}")
    passed = within == 1 and missed <= SUM_BAR
    sentence = (
        f"{within:.1%} of {len(accounts)} answers lack at most 2 ms beyond the network time (bar all), the worst "
        f"{lacks.max():.2f} ms; the states miss the whole by {missed * 1e6:.3f} us at most (bar 1): "
        f"{'met' if passed else 'MISSED'}."
    )
    samples = {name: [getattr(one, name) for one in accounts] for name in ("seen", "network", "told", "missed", "lack")}
    notes = ["the engine loop is the real one, the model a rule; client and server share the machine"]
    return Verdict(table, sentence, passed, samples, notes, used.others).conclude(args)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--users", type=int, default=16, help="connections")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between a user's requests, on average")
    parser.add_argument("--step", type=float, default=0.005, help="seconds of a step")
    sys.exit(main(parser.parse_args()))
