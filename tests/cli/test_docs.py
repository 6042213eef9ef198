"""What the documents say of commands, flags, files and code is so."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import COMMANDS
from headway.core import policies
from headway.core.request import Request, SamplingParams
from headway.core.table import RequestTable, Rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def flags(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    import_module(f"headway.cli.{command.replace('-', '_')}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path):
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for words in re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)", document.read_text(encoding="utf-8"), re.MULTILINE):
        assert set(words.split()) <= targets


def test_each_command_has_a_page_whose_flags_exist():
    sections = dict(
        re.findall(r"^## headway ([\w-]+)[^\n]*\n(.*?)(?=^## |\Z)", text("docs/cli.md"), re.MULTILINE | re.DOTALL)
    )
    assert set(sections) == set(COMMANDS)
    for command, section in sections.items():
        assert set(re.findall(r"`(--[a-z][a-z-]+)", section)) <= flags(command)


def test_flags_in_the_readme_exist():
    for command, rest in re.findall(r"^headway (\w+)(.*)$", text("README.md"), re.MULTILINE):
        assert set(re.findall(r"--[a-z][a-z-]+", rest.partition("#")[0])) <= flags(command)
    (serve,) = re.findall(r'make serve .*ARGS="([^"]+)"', text("README.md"))
    assert set(re.findall(r"--[a-z][a-z-]+", serve)) <= flags("serve")


def test_files_in_the_architecture_exist():
    drawing = re.search(r"src/headway/\n(.*?)```", text("docs/architecture.md"), re.DOTALL)[1]
    folder = ""
    for line in drawing.splitlines():
        if found := re.match(r"  (\w+)/ ", line):
            folder = found[1]
            assert (ROOT / "src/headway" / folder).is_dir()
        for file in re.findall(r"(\w+\.py|policies/)", line):
            assert (ROOT / "src/headway" / folder / file).exists(), file


def test_the_policy_in_contributing_works(tmp_path: Path):
    (source,) = re.findall(r"```python\n(.*?)```", text("CONTRIBUTING.md"), re.DOTALL)
    (tmp_path / "lifo.py").write_text(source, encoding="utf-8")
    table = RequestTable()
    rows = [
        table.add(Request(str(handle), handle, [1, 2], SamplingParams(max_tokens=5), arrival=arrival), 7, 2)
        for handle, arrival in enumerate([3.0, 1.0, 2.0])
    ]
    for name in (f"{tmp_path}/lifo.py:Lifo", f"aged:{tmp_path}/lifo.py:Lifo"):
        policy = policies.make(name)
        view = Rows(table, np.array(rows), 4.0)
        policy.arrived(view, 4.0)
        assert list(np.argsort(policy.score(view, 4.0))) == [0, 2, 1]
