"""A tokenizer from the metadata of a GGUF file, which carries the vocabulary but not the rules around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway.core.errors import ModelError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _BytePairRules:
    """What `tokenizer.ggml.pre` stands for: how text is cut before byte-level pairs are merged.

    `split` is a regular expression of whose matches and gaps pieces are made; None is GPT-2's. `whole_words`: a piece
    that is in the vocabulary is taken without merging.
    """

    split: str | None = None
    single_digits: bool = False
    compose: bool = False
    whole_words: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS = {
    "gpt-2": _BytePairRules(),
    "smollm": _BytePairRules(single_digits=True),
    "starcoder": _BytePairRules(single_digits=True),
    "llama-bpe": _BytePairRules(split=_LLAMA3_SPLIT, whole_words=True, add_bos=True),
    "qwen2": _BytePairRules(split=_QWEN2_SPLIT, compose=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the keys `tokenizer.ggml.*` describe.

    Raises:
        ModelError: a kind of tokenizer or of pre-tokenizer that is not known here, or keys that are missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; of GGUF tokenizers headway reads 'gpt2' and 'llama'")
    _add_marked_tokens(tokenizer, metadata)
    _add_frame(tokenizer, metadata, add_bos)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    rules = _PRE_TOKENIZERS.get(str(name))
    if rules is None:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"tokenizer.ggml.pre is {name!r}; of pre-tokenizers headway knows {known}")
    vocabulary = {token: i for i, token in enumerate(_list(metadata, "tokens"))}
    merges = [_pair(merge) for merge in _list(metadata, "merges")]
    tokenizer = _byte_pairs(vocabulary, merges, ignore_merges=rules.whole_words)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _byte_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"its tokenizer is damaged: {error}") from None


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _list(metadata, "tokens")
    types = _list(metadata, "token_type")
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _TokenType.UNKNOWN), None)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, _list(metadata, "scores"), types)
    tokenizer = _byte_pairs(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Sentencepiece merges the pair whose union scores best; as ranked pairs that is every cut of every piece."""
    ids = {t: i for i, t in enumerate(tokens) if types[i] in (_TokenType.NORMAL, _TokenType.USER_DEFINED)}
    ranked = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _add_marked_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens, and those the model's makers defined, stand for themselves wherever they occur in a text."""
    marked = zip(_list(metadata, "tokens"), _list(metadata, "token_type"), strict=True)
    specials, others = [], []
    for token, kind in marked:
        if kind == _TokenType.CONTROL:
            specials.append(AddedToken(token, normalized=False, special=True))
        elif kind == _TokenType.USER_DEFINED:
            others.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens(others)


def _add_frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """The tokens that surround a prompt."""
    before = _framing_token(metadata, "bos", add_bos)
    after = _framing_token(metadata, "eos", False)
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(token for token, _ in before), "$A", *(token for token, _ in after)],
            special_tokens=[*before, *after],
        )


def _framing_token(metadata: Mapping[str, Any], name: str, default: bool) -> list[tuple[str, int]]:
    index = special_id(metadata, name)
    if index is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    return [(_list(metadata, "tokens")[index], index)]


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of the token that the file calls `name` (bos, eos, eot, eom, unknown, padding), if it has one.

    Raises:
        ModelError: it is no token of the vocabulary.
    """
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    size = len(_list(metadata, "tokens"))
    if index is None or (isinstance(index, int) and 0 <= index < size):
        return index
    raise ModelError(f"tokenizer.ggml.{name}_token_id is {index!r}, but the vocabulary has {size} tokens")


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ModelError(f"the file has no tokenizer.ggml.{name}, so its tokenizer cannot be built")
    return values
