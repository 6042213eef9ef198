"""Errors as clients read them: `{"error": {"message", "type", "param", "code"}}`, a status, and when to come back."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from headway.core.request import RequestError, Unattainable
from headway.engine.stream import EngineClosed, EngineDead, GenerationError
from headway.engine.validation import QueueFull

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_RETRIED = (408, 409, 429)
"""Besides these, clients try again by themselves on every 5xx."""


class ApiError(Exception):
    """An answer that is an error.

    `retry_after` in seconds tells a client when trying again may help; None on a status that clients retry by
    themselves says that it cannot.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | None]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        if self.status in _RETRIED or self.status >= 500:
            return {"x-should-retry": "false"}
        return {}

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers(), media_type="application/json")


class OverQuota(ApiError):
    """A tenant has used up what it may have in a minute. `seconds` until it has room again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", retry_after=seconds)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about one of FAILURES."""
    match error:
        case ApiError():
            return error
        case QueueFull() | Unattainable():
            return ApiError(429, error.message, code=error.code, retry_after=math.ceil(error.retry_after))
        case RequestError():
            return ApiError(400, error.message, param=error.param, code=error.code)
        case EngineClosed():
            return aborted()
        case EngineDead():
            return ApiError(503, f"The engine has ended: {error}", code="engine_dead")
        case _:
            return ApiError(500, str(error), code="generation_failed")


def internal_error() -> ApiError:
    """For a defect of the server."""
    return ApiError(500, "The server made a mistake; its log says more.", code="internal_error")


def aborted() -> ApiError:
    """For a request that the server itself has cut off."""
    return ApiError(503, "The request was cut off because the server is stopping.", code="aborted", retry_after=5)


FAILURES = (ApiError, RequestError, EngineDead, GenerationError)
"""What a request may end with: the server's own refusals and what the engine raises."""
