"""What the HTTP side may be told; the engine's own settings are EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.request import Slo
from headway.server.keys import Keyring


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and habits of the HTTP server.

    `max_body_bytes`: a larger request body is refused with 413. `ping_seconds`: a stream that was silent for so long
    gets a comment, so that proxies keep it open. `grace_seconds`: how long requests in flight may go on after SIGTERM.
    `keep_alive_seconds`: how long an idle connection stays open. `status_line`: whether a line a second on standard
    error says what the server does while it has work. `cors_origins`: origins whose pages may read answers.
    `keys`: who is let in; None lets everybody in, and the admin endpoints answer on this machine only.
    `class_slo`: what requests of a class ("" is those of none) are promised where they do not say themselves.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    ping_seconds: float = 10.0
    grace_seconds: float = 10.0
    keep_alive_seconds: int = 75
    cors_origins: Sequence[str] = ("*",)
    status_line: bool = False
    keys: Keyring | None = None
    class_slo: Mapping[str, Slo] = field(default_factory=dict)
