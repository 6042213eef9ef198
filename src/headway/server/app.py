"""The FastAPI application."""

from __future__ import annotations

import http
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

import headway
from headway.server import admin
from headway.server.access import Gate
from headway.server.envelope import Envelope
from headway.server.errors import FAILURES, ApiError, as_api_error, internal_error
from headway.server.routes import BODIES, router
from headway.server.service import Service
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.engine.api import Engine


class _App(FastAPI):
    """FastAPI with the envelope around all of its layers, so that errors of any of them are in it."""

    def build_middleware_stack(self) -> ASGIApp:
        service = self.state.service
        return Envelope(Gate(super().build_middleware_stack(), service), service.settings.cors_origins)


def create_app(engine: Engine | None = None, settings: ServerSettings | None = None) -> FastAPI:
    """The server's application: OpenAI's API for `engine`, which stays its caller's to close.

    Without an engine it answers 503 until `app.state.service.attach(engine)`.
    """
    service = Service(settings or ServerSettings())
    app = _App(title="headway", version=headway.__version__, description="An LLM serving engine.")
    app.state.service = service
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    app.include_router(router)
    app.include_router(admin.router)
    for failure in FAILURES:
        app.add_exception_handler(failure, _failure)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _defect)
    if engine is not None:
        service.attach(engine)
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document (it is what /docs shows) with the bodies, which FastAPI does not parse."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        _, schemas = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return app.openapi_schema or {}


async def _failure(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if request.method == "POST":
        request.app.state.service.tally.reject(answer)
    return answer.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Routing found no such path or method."""
    assert isinstance(error, HTTPException)
    name = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    response = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=name).response()
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _defect(request: Request, error: Exception) -> Response:
    """The client hears of it in the usual form; the log gets the traceback."""
    return internal_error().response()
