"""Run-time control: how requests are scheduled, changed with requests in flight, by whoever may."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.core.config import SchedulerConfig
from headway.core.policies import AGED, POLICIES
from headway.server.access import holder_of
from headway.server.body import parse, read_body
from headway.server.errors import ApiError
from headway.server.service import Service
from headway.server.wire import dump

router = APIRouter(prefix="/admin")
_CHANGES = msgspec.json.Decoder(dict[str, Any])


@router.get("/scheduler")
async def scheduler(request: Request) -> Response:
    """How requests are scheduled now. Times are in seconds."""
    return _shown(_controlled(request))


@router.post("/scheduler")
async def change_scheduler(request: Request) -> Response:
    """Changes some fields of what GET shows, from the next step on. All of them or none."""
    service = _controlled(request)
    if not request.headers.get("content-type", "").startswith("application/json"):
        # What a page in a browser may send to this machine without asking first has another type.
        raise ApiError(415, "Send application/json.")
    changes = parse(await read_body(request, service.settings.max_body_bytes), _CHANGES)
    async with service.changing:  # else of two changes at a time one would be lost
        engine = service.live_engine()
        config = _changed(engine.scheduler_config, changes)
        try:
            await engine.follow(config)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return _shown(service)


def _controlled(request: Request) -> Service:
    """Raises ApiError: 403 for whoever is not on this machine, where the gate has not asked for an admin key."""
    client = request.client
    if holder_of(request) is None and (
        client is None or not _is_loopback(client.host) or "x-forwarded-for" in request.headers
    ):
        raise ApiError(403, "Without --api-keys the admin endpoints answer on the server's own machine only.")
    service: Service = request.app.state.service
    return service


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(service: Service) -> Response:
    return Response(dump(asdict(service.live_engine().scheduler_config)), media_type="application/json")


def _changed(config: SchedulerConfig, changes: dict[str, Any]) -> SchedulerConfig:
    """Raises ApiError: 400 for a name, a type or a value that cannot be."""
    known = asdict(config)
    for name in changes:
        if name not in known:
            raise ApiError(400, f"There is no setting {name!r}; there are: {', '.join(known)}.", param=name)
    policy = changes.get("policy", "")
    if isinstance(policy, str) and policy and policy.removeprefix(AGED) not in POLICIES:
        # One's own policy is a file that would be run: that is for the command line.
        raise ApiError(400, f"There is no policy {policy!r} here; there are: {', '.join(POLICIES)}.", param="policy")
    try:
        return msgspec.convert(known | changes, SchedulerConfig)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The setting is wrong: {error}.") from None
