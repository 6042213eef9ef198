"""JSON for the wire, and server-sent events around it."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def dump(value: Any) -> bytes:
    """`value` as JSON in one line.

    Some clients split lines as Python's str.splitlines does, so the characters at which only that splits are escaped.
    """
    data = _encode(value)
    return data if data.isascii() else _escape(data)


def dump_text(text: str) -> bytes:
    """The same for a string: the quick way for what is streamed."""
    data = _encode(text)
    return data if text.isascii() else _escape(data)


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: %b\n\n" % dump(value)


def _escape(data: bytes) -> bytes:
    return (
        data.replace(b"\xc2\x85", rb"\u0085").replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    )
