"""A request's body: bounded while it comes in, parsed by type, and its faults named."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headway.server.errors import ApiError

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_NOT_A_NUMBER = re.compile(rb'"(?P<field>[^"\\]+)"\s*:\s*-?(?:NaN|Infinity)')


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, of at most `limit` bytes; more is refused by Content-Length at once, or when it has come in.

    Raises:
        ApiError: 413.
        ClientDisconnect: the client left before the end.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type.

    Raises:
        ApiError: 400, naming the field at fault where there is one.
    """
    if not body.strip():
        raise ApiError(400, "The request body is empty; send a JSON object.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), body) from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {limit} bytes, the most that this server reads.", code="body_too_large"
    )


def _invalid(message: str) -> ApiError:
    """A value of the wrong type: msgspec says which, and where."""
    found = _PATH.search(message)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            return ApiError(400, f"The field {missing[1]} is required.", param=missing[1], code="missing_field")
        return ApiError(400, f"The request body is wrong: {message}.")
    path = found["path"]
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"The field {name} is required.", param=name, code="missing_field")
    said = message[: found.start()]
    return ApiError(400, f"{path}: {said[:1].lower()}{said[1:]}.", param=path, code="invalid_type")


def _malformed(message: str, body: bytes) -> ApiError:
    numbers = _NOT_A_NUMBER.search(body) if b"NaN" in body or b"Infinity" in body else None
    if numbers:
        field = numbers["field"].decode(errors="replace")
        return ApiError(
            400,
            f"The request body is not valid JSON: {field} must be a finite number (JSON has no NaN or Infinity).",
            param=field,
            code="invalid_json",
        )
    return ApiError(400, f"The request body is not valid JSON: {message}.", code="invalid_json")
