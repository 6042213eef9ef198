"""Stop strings against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.engine.stop import StopStrings

# Few letters, so that stop strings occur, overlap and repeat themselves.
words = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.text("abc", max_size=6), max_size=12)


def naive(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """What remains of a text whose first complete stop string ends it."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[: end if include else end - len(word)], word
    return text, None


def could_become(text: str, stop: list[str]) -> int:
    """The length of the longest end of the text that begins a stop string."""
    return max(n for n in range(len(text) + 1) if any(word.startswith(text[len(text) - n :]) for word in stop))


@given(stop=words, pieces=pieces, include=st.booleans())
def test_equals_a_search_of_the_whole_text_and_holds_back_no_more_than_needed(stop, pieces, include):
    watcher, shown, seen, by = StopStrings(stop, include), "", "", None
    for piece in pieces:
        safe, by = watcher.push(piece)
        shown, seen = shown + safe, seen + piece
        if by is not None:
            break
        assert shown == seen[: len(seen) - could_become(seen, stop)]
    assert (shown + watcher.flush(), by) == naive("".join(pieces), stop, include)


@given(stop=words, text=st.text("abc", max_size=40), include=st.booleans(), cut=st.integers(0, 40))
def test_how_the_text_is_cut_changes_nothing(stop, text, include, cut):
    def run(*parts: str) -> tuple[str, str | None]:
        watcher, shown = StopStrings(stop, include), ""
        for part in parts:
            safe, by = watcher.push(part)
            shown += safe
            if by is not None:
                return shown, by
        return shown + watcher.flush(), None

    assert run(text) == run(text[:cut], text[cut:]) == run(*text)


def test_what_is_held_back_is_shown_once_it_cannot_be_a_stop():
    watcher = StopStrings(["\n\nHuman:"])
    assert watcher.push("yes") == ("yes", None)
    assert watcher.push("\n") == ("", None)
    assert watcher.push("\n") == ("", None)
    assert watcher.push("no") == ("\n\nno", None)
    assert watcher.push("\n\nHum") == ("", None)
    assert watcher.flush() == "\n\nHum"
    assert watcher.flush() == ""


def test_stop_strings_of_more_than_one_plane():
    assert StopStrings(["🙂"]).push("ok 🙂 more") == ("ok ", "🙂")
    assert StopStrings(["🙂"], include=True).push("ok 🙂 more") == ("ok 🙂", "🙂")
