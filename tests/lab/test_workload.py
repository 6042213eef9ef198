"""Workloads: a data set cut off anywhere, the filter, seeds, files with mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lab import workload
from headway.lab.workload import WorkloadError

objects = st.dictionaries(
    st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=8), st.lists(st.booleans(), max_size=3))
)


class Words:
    """Counts words: a tokenizer whose counts a test can see."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text.split())))


@given(st.lists(objects, max_size=6), st.data(), st.sampled_from([None, 1]), st.booleans())
def test_a_data_set_cut_anywhere_yields_its_whole_items(items, data, indent, ascii_only):
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    cut = data.draw(st.integers(text.index("[") + 1, len(text)))
    decoded = list(workload.decode_items(text[:cut]))
    assert decoded == items[: len(decoded)]
    # An item is missing only where its last character is.
    whole = [
        len(json.dumps(items[: n + 1], indent=indent, ensure_ascii=ascii_only).rstrip("]\n")) for n in range(len(items))
    ]
    assert len(decoded) == sum(end <= cut for end in whole)


def test_text_that_is_no_array_is_refused():
    with pytest.raises(WorkloadError, match="not a JSON array"):
        list(workload.decode_items('{"conversations": []}'))


def conversation(prompt_words: int, answer_words: int, first: str = "human") -> dict:
    turns = [("human", prompt_words), ("gpt", answer_words)]
    if first == "gpt":
        turns.reverse()
    return {"conversations": [{"from": who, "value": " ".join(["word"] * words)} for who, words in turns]}


def test_sharegpt_keeps_the_usual_filter(monkeypatch):
    kept = [(4, 4), (1024, 1024), (10, 300)]
    left = [(3, 10), (1025, 10), (10, 3), (1024, 1025)]
    items = [conversation(*lengths) for lengths in kept + left]
    items += [conversation(20, 20, first="gpt"), {"conversations": []}, {"id": "no turns"}]
    monkeypatch.setattr(workload, "_sharegpt_text", lambda: json.dumps(items)[:-1])
    found = workload.sharegpt(3, Words(), seed=1)
    assert sorted((item.prompt_len, item.output_len) for item in found) == sorted(kept)
    with pytest.raises(WorkloadError, match="only 3 usable prompts, 4 were asked for"):
        workload.sharegpt(4, Words())
    capped = workload.sharegpt(2, Words(), max_prompt=10, max_output=50)
    assert sorted((item.prompt_len, item.output_len) for item in capped) == [(4, 4), (10, 50)]


def test_sharegpt_as_installed_is_the_same_for_a_seed(monkeypatch):
    beginning = workload._sharegpt_text()[:3_000_000]  # enough, and quicker
    monkeypatch.setattr(workload, "_sharegpt_text", lambda: beginning)
    first, again = (workload.sharegpt(20, Words(), seed=7) for _ in range(2))
    other = workload.sharegpt(20, Words(), seed=8)
    assert first == again
    assert {item.prompt for item in first} != {item.prompt for item in other}
    assert all(4 <= item.prompt_len <= 1024 and item.prompt_len + item.output_len <= 2048 for item in first)


def test_random_prompts_have_exactly_the_length_asked_for():
    items = workload.random_tokens(50, prompt_len=33, output_len=9, seed=3)
    assert {len(item.prompt) for item in items} == {33}
    assert {item.output_len for item in items} == {9}
    assert len({tuple(item.prompt[:4]) for item in items}) == 50  # no shared prefixes
    assert all(1000 <= token < 32000 for item in items for token in item.prompt)
    assert items == workload.random_tokens(50, prompt_len=33, output_len=9, seed=3)
    assert items != workload.random_tokens(50, prompt_len=33, output_len=9, seed=4)
    small = workload.random_tokens(5, prompt_len=100, output_len=1, vocab_size=300)
    assert all(150 <= token < 300 for item in small for token in item.prompt)


def test_random_text_has_a_word_per_token():
    (item,) = workload.random_text(1, prompt_len=40, output_len=2)
    assert len(item.prompt.split()) == 40


def test_a_file_holds_text_ids_or_messages(tmp_path: Path):
    lines = [
        {"prompt": "hello", "output_len": 5},
        {"prompt": "ids win", "prompt_token_ids": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "hi"}], "output_len": 100},
    ]
    path = tmp_path / "load.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    items = workload.from_file(path, output_len=20)
    assert [item.prompt for item in items] == ["hello", [1, 2, 3], [{"role": "user", "content": "hi"}]]
    assert [item.output_len for item in items] == [5, 20, 20]
    assert [item.prompt_len for item in items] == [None, 3, None]
    assert workload.from_file(path, 2, output_len=20) == items[:2]
    with pytest.raises(WorkloadError, match="only 3 usable prompts, 4 were asked for"):
        workload.from_file(path, 4, output_len=20)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"prompt": "x"}', "line 2: output_len must be a whole number of at least 1, got None"),
        ('{"prompt": "x", "output_len": 0}', "line 2: output_len must be"),
        ('{"prompt": "x", "output_len": true}', "line 2: output_len must be"),
        ('{"output_len": 4}', "line 2: it has none of prompt"),
        ('{"prompt_token_ids": [], "output_len": 4}', "line 2: prompt_token_ids must be a non-empty list of int"),
        ('{"messages": ["hi"], "output_len": 4}', "line 2: messages must be a non-empty list of dict"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "fine", "output_len": 3}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=message):
        workload.from_file(path)


def test_an_empty_file_is_no_workload(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    path.touch()
    with pytest.raises(WorkloadError, match="only 0 usable prompts"):
        workload.from_file(path)
