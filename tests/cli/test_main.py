"""The command line as a person meets it: help, versions, wrong calls; never a traceback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest

import headway
from headway.cli.main import COMMANDS, main


def run(*arguments: str, **how) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)


def test_without_a_command_help_is_shown_and_the_status_is_2(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headway {headway.__version__}\n"


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sevre"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "sevre" in error
    assert "serve" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_fits_a_screen(name: str, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: headway {name} ")
    assert max(map(len, text.splitlines())) <= 120


def test_the_overview_comes_at_once():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_help_imports_nothing_heavy(name: str):
    command = [sys.executable, "-X", "importtime", "-m", "headway.cli.main", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "tokenizers", "fastapi", "aiohttp", "rich"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: '0' is not a whole number of at least 1"),
        (["serve", "--max-num-seqs", "many"], "'many' is not a whole number"),
        (["serve", "--kv-cache-memory", "4Q"], "'4Q' is not a size in bytes such as 4G"),
        (["serve", "--gpu-memory-utilization", "1.5"], "'1.5' is not a number above 0 and at most 1"),
        (["serve", "--dtype", "float64"], "invalid choice: 'float64'"),
        (["serve", "--depth", "3"], "invalid choice: 3"),
        (["serve", "--port", "66000"], "'66000' is not a port"),
        (["serve", "--max-batch-size", "64", "--max-num-seqs", "32"], "max_num_seqs (32) is smaller than"),
        (["bench", "--rate", "0"], "'0' is not a number above 0, or inf"),
        (["bench", "--rate", "nan"], "'nan' is not a number above 0, or inf"),
        (["bench", "--extra-body", "[1]"], "'[1]' is not a JSON object"),
        (["generate", "--raw", "--system", "s", "hello"], "--system needs the chat template"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", [["serve", "/no/such/model.gguf"], ["info", "/no/such/model.gguf"]])
def test_a_missing_model_is_one_line_and_status_1(command: list[str]):
    done = run(*command)
    assert done.returncode == 1
    assert "/no/such/model.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_line_and_status_1():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"headway serve: port {port} on 127.0.0.1 is in use")
    assert done.stderr.count("\n") == 1


def test_an_empty_prompt_is_refused():
    done = run("generate", input=" \n")
    assert done.returncode == 1
    assert done.stderr == "headway generate: the prompt is empty\n"


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "headway.cli.main", "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert "Traceback" not in done.stderr
