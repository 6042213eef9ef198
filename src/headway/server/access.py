"""Who is let in: the key of each request, before any route sees it. Plain ASGI, as the envelope is."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.errors import ApiError
from headway.server.keys import Holder
from headway.server.params import Terms
from headway.server.protocol import Generate
from headway.server.service import Service

OPEN = frozenset({"/health", "/ping", "/version"})
"""Answered without a key: they say nothing about anybody."""
ADMIN = ("/admin/", "/metrics", "/load")
"""What tells or changes something about all tenants."""


class Gate:
    """Where there are keys, lets in who has one for the path; handlers find the holder in `request.state.holder`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = self._service.settings.keys
        if keys is None or scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            holder = self._holder(Headers(scope=scope).get("authorization", ""))
            if scope["path"].startswith(ADMIN) and not holder.admin:
                raise ApiError(403, f"{scope['path']} needs a key of scope admin.", code="insufficient_scope")
        except ApiError as refusal:
            self._service.tally.reject(refusal)
            await refusal.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["holder"] = holder
        quota = self._service.quotas.get(holder.tenant)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and quota is not None:
                MutableHeaders(scope=message).update(quota.headers())
            await send(message)

        await self.app(scope, receive, send_with_limits)

    def _holder(self, authorization: str) -> Holder:
        """Raises ApiError 401."""
        kind, _, key = authorization.partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise ApiError(401, "Send your key: `Authorization: Bearer KEY`.", code="invalid_api_key")
        keys = self._service.settings.keys
        holder = keys.find(key.strip()) if keys is not None else None
        if holder is None:
            raise ApiError(401, "This key is not known here.", code="invalid_api_key")
        return holder


def holder_of(request: Request) -> Holder | None:
    """Whose key it came with; None where the server has no keys."""
    return getattr(request.state, "holder", None)


def tenant_of(holder: Holder | None) -> str:
    """Within which a client's ids are its own: its key's tenant; "" where the server has no keys."""
    return "" if holder is None else holder.tenant


def within(holder: Holder | None, terms: Terms, body: Generate) -> Terms:
    """The terms that a request gets: its holder's tenant, and no more than the holder may ask.

    Shorter promises than allowed are lengthened. A priority or a class that is not allowed is refused; whoever names
    none gets the nearest priority to 0, and the first of the classes where not all are allowed.

    Raises:
        ApiError: 403, with what is allowed.
    """
    if holder is None:
        return terms
    low, high = holder.priority
    if body.priority is not None and not low <= terms.priority <= high:
        raise ApiError(
            403,
            f"priority {terms.priority} is not allowed with this key: {low} to {high} are.",
            param="priority",
            code="not_allowed",
        )
    request_class = terms.request_class
    if holder.classes and not request_class:
        request_class = holder.classes[0]
    if holder.classes and request_class not in holder.classes:
        raise ApiError(
            403,
            f"request_class {request_class!r} is not allowed with this key: {', '.join(holder.classes)} are.",
            param="request_class",
            code="not_allowed",
        )
    return replace(
        terms,
        priority=min(max(terms.priority, low), high),
        slo=holder.clamped(terms.slo),
        tenant=holder.tenant,
        request_class=request_class,
    )
