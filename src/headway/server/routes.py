"""The endpoints. Bodies are parsed by type (body.py), answers written by answer.py and sent by delivery.py."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import headway
from headway.core.request import RequestError
from headway.server.access import holder_of, tenant_of, within
from headway.server.answer import Answer, Identity, Wants
from headway.server.body import parse, read_body
from headway.server.chat import ChatAnswer
from headway.server.completion import CompletionAnswer
from headway.server.delivery import EventStream, collect
from headway.server.errors import ApiError
from headway.server.params import chat_params, completion_params, refuse_unsupported, request_name, terms
from headway.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    StreamOptions,
    TokenizeRequest,
)
from headway.server.service import Service
from headway.server.timelines import KEPT
from headway.server.wire import dump

router = APIRouter()

T = TypeVar("T")

_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def _reads(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """For the OpenAPI document, which app.py completes with the schemas of BODIES."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(value: Any) -> Response:
    return Response(dump(value), media_type="application/json")


async def _body(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    return parse(await read_body(request, _service(request).settings.max_body_bytes), decoder)


@router.post("/v1/completions", openapi_extra=_reads(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service = _service(request)
    service.live_engine()
    _knock(request)
    body = await _body(request, _COMPLETION)
    service.check_model(body.model)
    params = completion_params(body)
    prompts = await service.prompts.completion(body, params.max_tokens, service.max_sequences)
    identity = _identity("cmpl", body, service)
    streams = service.submit(prompts, params, within(holder_of(request), terms(body), body), identity.id, "prompt")
    wants = _wants(body, logprobs=params.logprobs is not None)
    tokenizer = service.engine.tokenizer
    echoes = [prompt.shown(tokenizer, params.skip_special_tokens) for prompt in prompts] if body.echo else ()
    return await _deliver(request, body, CompletionAnswer(identity, wants, streams, tokenizer, echoes))


@router.post("/v1/chat/completions", openapi_extra=_reads(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request)
    service.live_engine()
    _knock(request)
    body = await _body(request, _CHAT)
    service.check_model(body.model)
    params = chat_params(body)
    prompt = await service.prompts.chat(body, params.max_tokens)
    identity = _identity("chatcmpl", body, service)
    streams = service.submit([prompt], params, within(holder_of(request), terms(body), body), identity.id, "messages")
    wants = _wants(body, logprobs=params.logprobs is not None)
    return await _deliver(request, body, ChatAnswer(identity, wants, streams, service.engine.tokenizer))


def _knock(request: Request) -> None:
    """Raises OverQuota: the tenant has sent too many requests."""
    holder = holder_of(request)
    quota = _service(request).quotas.get(holder.tenant) if holder is not None else None
    if quota is not None:
        quota.knock()


def _identity(prefix: str, body: Generate, service: Service) -> Identity:
    return Identity(f"{prefix}-{request_name(body) or uuid.uuid4().hex}", int(time.time()), service.engine.model_name)


def _wants(body: Generate, *, logprobs: bool) -> Wants:
    options = body.stream_options or StreamOptions()
    return Wants(
        usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
    )


async def _deliver(request: Request, body: Generate, answer: Answer) -> Response:
    service = _service(request)
    tenant = tenant_of(holder_of(request))
    visit = service.timelines.open(answer.identity.id, request.state.begun, answer.streams, tenant)
    request.state.at_end = partial(service.timelines.close, visit)
    if body.stream:
        return EventStream(answer, service.outbox, service.settings.ping_seconds)
    whole = answer.whole(await collect(answer.streams, request.receive))
    return Response(whole, media_type="application/json")


@router.post("/tokenize", openapi_extra=_reads(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of messages through the chat template."""
    service = _service(request)
    prompts, tokenizer = service.prompts, service.engine.tokenizer
    body = await _body(request, _TOKENIZE)
    service.check_model(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages.", param="prompt")
    if body.messages is not None:
        text, param, adds = prompts.render(body, body.messages), "messages", bool(body.add_special_tokens)
    else:
        text, param, adds = body.prompt or "", "prompt", body.add_special_tokens is not False
    tokens = await prompts.encode(text, param, add_special_tokens=adds)
    return _json(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": list(map(tokenizer.token, tokens)) if body.return_token_strs else None,
        }
    )


@router.post("/detokenize", openapi_extra=_reads(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = _service(request)
    engine = service.engine
    body = await _body(request, _DETOKENIZE)
    service.check_model(body.model)
    service.prompts.check_ids(body.tokens, "tokens")
    return _json({"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _model_card(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": engine.model_name,
        "object": "model",
        "created": engine.created,
        "owned_by": "headway",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served."""
    service = _service(request)
    service.live_engine()
    return _json({"object": "list", "data": [_model_card(service)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One model."""
    service = _service(request)
    service.live_engine()
    service.check_model(name)
    return _json(_model_card(service))


@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """200 while requests can be served, else 503."""
    _service(request).live_engine()
    return Response()


@router.get("/version")
async def version() -> Response:
    """headway's version."""
    return _json({"version": headway.__version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """How much the server has to do now."""
    stats = _service(request).live_engine().stats
    return _json(
        {
            "server_load": stats.num_running + stats.num_waiting,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_usage,
        }
    )


@router.get("/v1/requests/{id:path}/timeline")
async def timeline(request: Request, id: str) -> Response:
    """Where the time of an answer went; `id` is the answer's, under way or ended lately. In seconds.

    A tenant reads its own; with a key of scope admin, all are read."""
    service = _service(request)
    holder = holder_of(request)
    shown = await service.timelines.show(id, service.engine, None if holder and holder.admin else tenant_of(holder))
    if shown is None:
        raise ApiError(404, f"There is no answer {id!r} under way or among the latest {KEPT}.", param="id")
    return _json(shown)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(_service(request).exposition.text(), media_type=CONTENT_TYPE_LATEST)
