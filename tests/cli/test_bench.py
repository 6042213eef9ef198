"""`headway bench` from its flags to its table, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.scripted import ScriptedServer, serving

from headway.cli.main import main


@pytest.fixture
def served() -> Iterator[tuple[str, ScriptedServer]]:
    """A scripted server on an event loop of its own, for a command that runs one itself."""
    server, url, started, stop = ScriptedServer(), [], threading.Event(), []

    async def run() -> None:
        async with serving(server) as address:
            url.append(address)
            ended = asyncio.Event()
            stop.extend([asyncio.get_running_loop(), ended])
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(10)
    try:
        yield url[0], server
    finally:
        stop[0].call_soon_threadsafe(stop[1].set)
        thread.join()


def workload(folder: Path, *prompts: str) -> str:
    path = folder / "load.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "output_len": 4}) for prompt in prompts), encoding="utf-8")
    return str(path)


def test_a_run_prints_its_table_and_writes_its_samples(served, tmp_path: Path, capsys):
    url, server = served
    out = tmp_path / "run.json"
    flags = ["--dataset", workload(tmp_path, *["ok"] * 5, "warm"), "--warmup", "1", "--concurrency", "2"]
    assert main(["bench", "--base-url", url, "--api-key", "secret", "--json", str(out), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"scripted at {url}: closed loop, concurrency 2")
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        assert re.search(rf"{name} │ +\d+\.\d │", text)
    assert [body["prompt"] for body in server.bodies] == ["warm", *["ok"] * 5]
    document = json.loads(out.read_text(encoding="utf-8"))
    assert len(document["samples"]) == document["summary"]["requests"] == 5
    assert document["flags"]["seed"] == 0
    assert document["machine"]["cores"] >= 1
    assert "secret" not in out.read_text(encoding="utf-8")


def test_failures_and_short_answers_show_and_fail_the_command(served, tmp_path: Path, capsys):
    url, _ = served
    flags = ["--dataset", workload(tmp_path, "ok", "refuse", "short"), "--rate", "inf"]
    assert main(["bench", "--base-url", url, "--model", "m", *flags]) == 1
    text = capsys.readouterr().out
    assert "1 failed: 429 the queue is full" in text
    assert "1 short" in text
    assert re.search(r"3 +│ +1 +│ +1 +│", text)


def test_random_prompts_go_as_ids_or_as_words(served):
    url, server = served
    flags = [
        "bench",
        "--base-url",
        url,
        "--dataset",
        "random",
        "--num-prompts",
        "1",
        "--input-len",
        "7",
        "--output-len",
        "3",
    ]
    assert main(flags) == 0
    assert main([*flags, "--endpoint", "chat"]) == 0
    ids, chat = server.bodies
    assert len(ids["prompt"]) == 7
    assert ids["max_tokens"] == chat["max_tokens"] == 3
    assert len(chat["messages"][0]["content"].split()) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "/no/such/file.jsonl"], "No such file or directory: /no/such/file.jsonl"),
        (["--json", "/no/such/folder/run.json"], "--json: /no/such/folder is not a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(served, flags: list[str], message: str, capsys):
    url, _ = served
    assert main(["bench", "--base-url", url, *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"headway bench: {message}\n"


def test_no_server_is_one_line(capsys):
    assert main(["bench", "--base-url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headway bench: no server answers at http://127.0.0.1:9")
    assert error.count("\n") == 1


def test_the_load_test_and_its_data_set_need_no_torch():
    source = (
        "import sys; from headway.cli.main import main\n"
        "from headway.cli.bench import _tokenizer\n"
        "import headway.lab.workload, headway.lab.report, headway.lab.machine\n"
        "assert main(['bench', '--base-url', 'http://127.0.0.1:9']) == 1\n"
        "_tokenizer(None)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
