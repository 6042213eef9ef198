"""Stop strings in a stream: found as soon as they are complete, and never half shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that comes in pieces for the first stop string to be complete.

    Of several complete at the same character the longest counts. `include`: the stop string is part of the text.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(word) for word in stop]
        self._firsts = frozenset(word[0] for word in stop)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(what may be shown, the stop string that ended the text or None).

        Held back is only an end of the text that may yet become a stop string. After a stop nothing more is to be
        pushed.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        seen = len(self._held)
        held = self._held + text
        for position in range(seen, len(held)):
            char = held[position]
            found = [matcher.word for matcher in self._matchers if matcher.advance(char)]
            if found:
                word = max(found, key=len)
                self._held = ""
                end = position + 1
                return held[: end if self._include else end - len(word)], word
        keep = len(held) - max(matcher.matched for matcher in self._matchers)
        self._held = held[keep:]
        return held[:keep], None

    def flush(self) -> str:
        """What was held back, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's automaton: `matched` is the longest end of the text that begins `word`."""

    __slots__ = ("_fallback", "matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0
        self._fallback = [0] * len(word)
        for position in range(1, len(word)):
            length = self._shorten(self._fallback[position - 1], word[position])
            self._fallback[position] = length

    def advance(self, char: str) -> bool:
        """Whether the word ends with this character."""
        self.matched = self._shorten(self.matched, char)
        return self.matched == len(self.word)

    def _shorten(self, length: int, char: str) -> int:
        while length and self.word[length] != char:
            length = self._fallback[length - 1]
        return length + 1 if self.word[length] == char else length
