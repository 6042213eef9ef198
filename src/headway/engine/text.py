"""Text to tokens and back, one token at a time where it streams."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headway.core.errors import ModelError
from headway.core.request import RequestError
from headway.engine.tokenizer_files import TokenizerFiles, read_tokenizer


class Tokenizer:
    """A model's tokenizer and chat template. Text is the UTF-8 of its tokens' bytes, ill-formed parts replaced.

    `bos_token_id`: None where the model has none. `eos_token_ids`: all the ids that end an answer.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = backend = files.backend
        self._chat_template = files.chat_template
        self._bytes, self._strip_first_space = _byte_table(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id = files.bos_token_id
        self.eos_token_ids = files.eos_token_ids

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face layout or of a .gguf file.

        Raises:
            ModelError: none there, damaged, or of a kind that is not supported.
        """
        return cls(read_tokenizer(Path(path)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids; special tokens spelled out in it are recognised.

        `add_special_tokens`: frame it as the model was trained to see it (bos ...), if it was; prompts made by a chat
        template are already framed.

        Raises:
            RequestError: text that is not valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid text: {error}", param="prompt") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; ids outside the vocabulary are ignored."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def token(self, token_id: int) -> str:
        """One token as text, special or not; bytes that are no whole character are replaced."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty for an id outside the vocabulary."""
        return self._bytes[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """A conversation in OpenAI's form as one prompt, to be encoded with add_special_tokens=False.

        `add_generation_prompt` ends it where the assistant begins; `continue_final_message` leaves the last message
        open instead. `kwargs` go to the template.

        Raises:
            RequestError: the model has no template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        return self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=kwargs,
        )

    def detokenizer(self, prompt_tail: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer. `prompt_tail`: the prompt's last few ids, of which the answer is the continuation."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        detokenizer = Detokenizer(self._bytes, skipped, self._strip_first_space)
        for token_id in prompt_tail:
            detokenizer.push(token_id)
        return detokenizer


class Detokenizer:
    """Turns tokens into text as they come: `push` returns what is certain, `flush` the rest."""

    __slots__ = ("_bytes", "_pending", "_skipped", "_strip")

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int], strip_first_space: bool) -> None:
        self._bytes = table
        self._skipped = skipped
        self._strip = strip_first_space
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that this token completes: '' while it ends in the middle of a character."""
        if token_id in self._skipped:
            return ""
        data = self._pending + self._bytes[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """What was still incomplete, as a replacement character."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def _stripped(self, text: str) -> str:
        """Sentencepiece writes a space before the first word, which is not part of the text."""
        if not text:
            return text
        self._strip = False
        return text.removeprefix(" ")


class _ByteTable(dict[int, bytes]):
    """Each token's bytes, found when first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer, spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._backend = backend
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        self[token_id] = spelled = b"" if token is None else self._spell(token)
        return spelled


def _byte_table(backend: tokenizers.Tokenizer) -> tuple[_ByteTable, bool]:
    """The bytes of a tokenizer's tokens, and whether the text's first space is to be dropped."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    if decoder["type"] == "ByteLevel":
        return _ByteTable(backend, _byte_level_bytes), False
    steps = [step["type"] for step in decoder.get("decoders", ())]
    if steps[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[3:] in ([], ["Strip"]):
        return _ByteTable(backend, _sentencepiece_bytes), steps[3:] == ["Strip"]
    raise ModelError(
        f"the tokenizer's decoder ({' + '.join(steps) or decoder['type']}) is not supported: headway reads byte-level "
        "and sentencepiece-like tokenizers"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, spelled as itself
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
