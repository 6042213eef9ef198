"""Tokenisers against transformers' reading of the same files; streaming against decoding all at once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import models as bpe_models
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, Qwen2Tokenizer

from headway.core.request import RequestError
from headway.engine.text import Tokenizer
from headway.models import ModelError
from headway.models.gguf import GgufFile
from tests import ggufs
from tests.texts import AWKWARD, sharegpt

TEXTS = [*AWKWARD, *sharegpt(150)]
MERGES = 4000
BLANK_BEFORE_NUMBER = re.compile(r"\s[\d½²ⅷ]")


def transformers_tokenizer(path: Path):
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def write_byte_level(path: Path, source: Path, **changes: object) -> Path:
    """A GGUF with the embedded model's first tokens and merges: transformers reads a short one in little time."""
    metadata = GgufFile(source).metadata
    merges = metadata["tokenizer.ggml.merges"]
    keep = len(metadata["tokenizer.ggml.tokens"]) - len(merges) + MERGES
    own = {k: v for k, v in metadata.items() if k.startswith("tokenizer.") and "template" not in k}
    own |= {f"tokenizer.ggml.{name}": metadata[f"tokenizer.ggml.{name}"][:keep] for name in ("tokens", "token_type")}
    own |= {"tokenizer.ggml.merges": merges[:MERGES]} | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    return ggufs.write(path, ggufs.llama_tensors(), own)


@pytest.fixture(scope="module")
def short_gguf(embedded_gguf, tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("tokenizer") / "short.gguf", embedded_gguf)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_byte_level_tokens_are_those_of_transformers(pre, embedded_gguf, tmp_path):
    path = write_byte_level(tmp_path / "short.gguf", embedded_gguf, pre=pre, add_bos_token=False)
    ours, theirs = Tokenizer.load(path), transformers_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_smollm_cuts_every_digit_off_first(short_gguf):
    """transformers reads `smollm` as `gpt-2`. The model's own tokenizer first isolates each digit, so that blanks
    before a number stay together; with that step added, theirs is the truth."""
    ours, theirs = Tokenizer.load(short_gguf), transformers_tokenizer(short_gguf)
    for text in TEXTS:
        if not BLANK_BEFORE_NUMBER.search(text):
            assert ours.encode(text) == theirs(text)["input_ids"], text
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.slow
def test_the_embedded_tokenizer_at_full_size(embedded_gguf, tokenizer):
    theirs = transformers_tokenizer(embedded_gguf)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*AWKWARD, *sharegpt(2000)]:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]


def test_qwen2_composes_characters_and_splits_digits(embedded_gguf, tmp_path):
    path = write_byte_level(tmp_path / "short.gguf", embedded_gguf, pre="qwen2")
    metadata = GgufFile(path).metadata
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": metadata["tokenizer.ggml.tokens"][:17]})
    ours = Tokenizer.load(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_llama_bpe_takes_whole_words_without_merging(embedded_gguf, tmp_path):
    path = write_byte_level(tmp_path / "a.gguf", embedded_gguf, pre="llama-bpe", add_bos_token=False)
    metadata = GgufFile(path).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    path = write_byte_level(
        path, embedded_gguf, pre="llama-bpe", add_bos_token=False, tokens=[*tokens[:-1], "Zyzzyva"], merges=merges[:-1]
    )
    assert Tokenizer.load(path).encode("Zyzzyva") == [len(tokens) - 1]


def test_bos_is_added_as_the_file_says(embedded_gguf, tmp_path):
    def ids(special: bool, **changes: object) -> list[int]:
        path = write_byte_level(tmp_path / "a.gguf", embedded_gguf, **changes)
        return Tokenizer.load(path).encode("a b", add_special_tokens=special)

    plain = ids(True)
    assert ids(True, add_bos_token=True) == [1, *plain]
    assert ids(False, add_bos_token=True) == plain
    assert ids(True, add_bos_token=True, add_eos_token=True) == [1, *plain, 2]


# Sentencepiece


@pytest.fixture(scope="module")
def sentencepiece_gguf(tmp_path_factory):
    """A vocabulary of pieces with scores, trained on ShareGPT; no merges, as in Llama 2's files."""
    backend = Backend(bpe_models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁\n]+|[▁\n]"), "isolated")
    ascii_texts = ["".join(char for char in text if char < "\x7f") for text in sharegpt(150)]
    backend.train_from_iterator(ascii_texts, BpeTrainer(vocab_size=1500, show_progress=False))
    pieces = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    own = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = tmp_path_factory.mktemp("sentencepiece") / "pieces.gguf"
    return ggufs.write(path, ggufs.llama_tensors(), own)


def sentencepiece_by_definition(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """Characters; then, while any two neighbours make a piece, the pair whose piece scores best; bytes for the rest."""
    score = dict(zip(tokens[259:], scores[259:], strict=True))
    pieces = list(("▁" + text).replace(" ", "▁")) if text else []
    while pairs := [(-score[pair], i) for i in range(len(pieces) - 1) if (pair := pieces[i] + pieces[i + 1]) in score]:
        _, best = min(pairs)
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    ids = {token: i for i, token in enumerate(tokens)}
    return [i for p in pieces for i in ([ids[p]] if p in ids else [3 + byte for byte in p.encode()])]


def test_sentencepiece_tokens_are_those_of_its_definition(sentencepiece_gguf):
    metadata = GgufFile(sentencepiece_gguf).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    tokenizer = Tokenizer.load(sentencepiece_gguf)
    for text in [
        "",
        " two  spaces ",
        "\n\ttabs",
        "naïve 漢字 🙂",
        "don't stop 12345",
        *(t[:200] for t in sharegpt(40)),
    ]:
        assert tokenizer.encode(text) == [1, *sentencepiece_by_definition(text, tokens, scores)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_tokens_are_those_of_transformers(sentencepiece_gguf):
    ours, theirs = Tokenizer.load(sentencepiece_gguf), transformers_tokenizer(sentencepiece_gguf)
    for text in TEXTS:
        if text and not text.startswith(" "):
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_answer_keeps_the_space_that_begins_it(sentencepiece_gguf):
    tokenizer = Tokenizer.load(sentencepiece_gguf)
    ids = tokenizer.encode("one two", add_special_tokens=False)
    cut = len(tokenizer.encode("one", add_special_tokens=False))
    continued, alone = tokenizer.detokenizer(prompt_tail=ids[:cut]), tokenizer.detokenizer()
    assert "".join(map(continued.push, ids[cut:])) == " two"
    assert "".join(map(alone.push, ids[cut:])) == "two"


# Folders


def test_a_folder_gives_the_same_tokens_and_ends(tiny_model_dir, tokenizer, tmp_path):
    folder = Tokenizer.load(tiny_model_dir)
    assert (folder.bos_token_id, folder.eos_token_ids, folder.vocab_size) == (1, (2,), 49152)
    for text in TEXTS:
        assert folder.encode(text) == tokenizer.encode(text)
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Tokenizer.load(copy).eos_token_ids == (2, 0)


def test_a_folder_without_tokenizer_json_is_converted(sentencepiece_gguf, tmp_path):
    """The older files of a GPT-2-like tokenizer."""
    vocabulary = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hi hi") == [3, 4, 3]
    assert tokenizer.decode([3, 4, 3]) == "hi hi"


def test_truncation_and_padding_in_the_file_are_not_applied(tiny_model_dir, tokenizer, tmp_path):
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("one two three four five six") == tokenizer.encode(
        "one two three four five six"
    )


def test_what_cannot_be_read_is_refused(tiny_model_dir, embedded_gguf, tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'chatglm'.*gpt-2, smollm"):
        Tokenizer.load(write_byte_level(tmp_path / "a.gguf", embedded_gguf, pre="chatglm"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        Tokenizer.load(write_byte_level(tmp_path / "a.gguf", embedded_gguf, model="rwkv"))
    with pytest.raises(ModelError, match=r"its tokenizer is damaged: .*out of vocabulary"):
        Tokenizer.load(write_byte_level(tmp_path / "a.gguf", embedded_gguf, merges=["Zyzz yva"]))
    with pytest.raises(ModelError, match=r"eos_token_id is 99999, but the vocabulary has \d+ tokens"):
        Tokenizer.load(write_byte_level(tmp_path / "a.gguf", embedded_gguf, eos_token_id=99999))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is None"):
        Tokenizer.load(ggufs.write(tmp_path / "a.gguf", ggufs.llama_tensors()))
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    with pytest.raises(ModelError, match="runs no code from a model"):
        Tokenizer.load(folder)


def test_text_that_is_not_unicode_is_a_bad_request(tokenizer):
    with pytest.raises(RequestError, match="not valid text"):
        tokenizer.encode("half a pair: \ud83d")


# Streams


def test_single_tokens(tokenizer):
    ids = tokenizer.encode("naïve 🙂 <|im_end|>")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "naïve 🙂 <|im_end|>".encode()
    assert tokenizer.token(2) == "<|im_end|>"
    assert (tokenizer.token(10**6), tokenizer.token_bytes(10**6)) == ("", b"")


def test_decoding_equals_that_of_the_tokenizers_library(tiny_model_dir):
    backend = Backend.from_file(str(tiny_model_dir / "tokenizer.json"))
    tokenizer = Tokenizer.load(tiny_model_dir)
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token(token_id) == backend.decode([token_id], skip_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49160), max_size=40), skip=st.booleans(), tail=st.integers(0, 3))
def test_a_stream_of_any_tokens_equals_decoding_them_all(tokenizer, tiny_model_dir, ids, skip, tail):
    backend = _backend(tiny_model_dir)
    known = [i for i in ids if i < tokenizer.vocab_size]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)
    assert tokenizer.decode(ids, skip) == backend.decode(known, skip_special_tokens=skip)


_BACKENDS: dict[Path, Backend] = {}


def _backend(folder: Path) -> Backend:
    if folder not in _BACKENDS:
        _BACKENDS[folder] = Backend.from_file(str(folder / "tokenizer.json"))
    return _BACKENDS[folder]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_text_arrives_as_soon_as_its_characters_are_whole(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids, False) == text)  # the vocabulary lacks some bytes, and with them rare characters
    detokenizer, data, shown = tokenizer.detokenizer(skip_special_tokens=False), b"", ""
    for i in ids:
        shown += detokenizer.push(i)
        data += tokenizer.token_bytes(i)
        assert shown == data.decode(errors="ignore")
    tail = tokenizer.detokenizer(ids[:cut], skip_special_tokens=False)
    rest = "".join(map(tail.push, ids[cut:])) + tail.flush()
    assert (
        tokenizer.decode(ids, False) == b"".join(map(tokenizer.token_bytes, ids[:cut])).decode(errors="ignore") + rest
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streams_of_sentencepiece_tokens(sentencepiece_gguf, data):
    tokenizer = Tokenizer.load(sentencepiece_gguf)
    text = data.draw(st.text(max_size=40))
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids) == text


def test_text_needs_no_torch(embedded_gguf):
    code = f"""
import sys
from headway.engine.resolve import resolve_model
from headway.engine.text import Tokenizer
Tokenizer.load({str(embedded_gguf)!r}).encode("hi")
print([name for name in ("torch", "transformers", "gguf") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
