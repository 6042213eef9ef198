"""What every answer carries: X-Request-Id, openai-processing-ms and CORS. Plain ASGI: a chunk only passes."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LIMITS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
_EXPOSED = ", ".join(["x-request-id", "openai-processing-ms", "retry-after", "x-should-retry", *_LIMITS])


class Envelope:
    """Adds the common headers and answers CORS preflights; handlers find the id in `request.state.request_id`,
    and in `begun` when the request came. What they leave in `at_end` is called when the answer has been written."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self.app = app
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.monotonic()
        request = Headers(scope=scope)
        request_id = _request_id(request.get("x-request-id", ""))
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, direct_send=send, begun=begun)

        async def send_enveloped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - begun) * 1000))
                self._allow_origin(request, headers)
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in request:
            await send_enveloped({"type": "http.response.start", "status": 204, "headers": _preflight(request)})
            await send_enveloped({"type": "http.response.body", "body": b""})
            return
        try:
            await self.app(scope, receive, send_enveloped)
        finally:
            if (at_end := state.get("at_end")) is not None:
                at_end(time.monotonic())

    def _allow_origin(self, request: Headers, headers: MutableHeaders) -> None:
        origin = request.get("origin")
        if origin is None:
            return
        if "*" in self.origins:
            headers["access-control-allow-origin"] = "*"
        elif origin in self.origins:
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("Origin")
        else:
            return
        headers["access-control-expose-headers"] = _EXPOSED


def direct_send(scope: Scope, send: Send) -> Send:
    """A shorter way out for body messages after the first than `send`, which leads through every layer of the app."""
    direct: Send = scope.get("state", {}).get("direct_send", send)
    return direct


def _request_id(given: str) -> str:
    """The client's own id where it can safely be sent back and logged, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _preflight(request: Headers) -> list[tuple[bytes, bytes]]:
    asked = request.get("access-control-request-headers", "*")
    return [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]
