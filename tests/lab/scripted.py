"""An OpenAI-compatible server that does as its prompts say, with known delays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

FIRST, GAP = 0.06, 0.02
"""Seconds before the first token, and between two."""
SCRIPTS = ("refuse", "hang", "short", "empty", "break", "error", "garbage", "no usage")
"""Prompts that make it misbehave; any other is answered in full."""


class ScriptedServer:
    """Answers as the prompt says. Counts who is served at the same time."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.serving = self.most = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.serving += 1
        self.most = max(self.most, self.serving)
        try:
            return await self._answer(request, body, chat="messages" in body)
        finally:
            self.serving -= 1

    async def _answer(self, request: web.Request, body: dict, chat: bool) -> web.StreamResponse:
        script = body["messages"][0]["content"] if chat else body["prompt"]
        if script == "refuse":
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        if script == "hang":
            await asyncio.sleep(60)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)

        async def send(event: object) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await reply.write(f": ping\n\ndata: {data}\n\n".encode())

        tokens = body["max_tokens"] if script != "short" else body["max_tokens"] // 2
        if script == "empty":
            await send("[DONE]")
            return reply
        if chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index in range(tokens):
            await asyncio.sleep(FIRST if index == 0 else GAP)
            piece = {"delta": {"content": "x"}} if chat else {"text": "" if index == 1 else "x"}
            await send({"choices": [piece | {"finish_reason": None}]})
            if script == "break" and index == 1:
                request.transport.close()
                return reply
            if script == "error" and index == 1:
                await send({"error": {"message": "the engine stopped"}})
                return reply
            if script == "garbage":
                await send("{not json")
                return reply
        end = {"delta": {}} if chat else {"text": ""}
        await send({"choices": [end | {"finish_reason": "length"}]})
        if script != "no usage":
            await send({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": tokens}})
        await send("[DONE]")
        return reply

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[str]:
    """The server on a free port, as its URL."""
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.completions)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
