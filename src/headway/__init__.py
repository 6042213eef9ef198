"""headway: an LLM serving engine whose heart is batching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.core.request import Request, SamplingParams, Slo

if TYPE_CHECKING:
    from headway.engine.api import LLM, Engine

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "Request", "SamplingParams", "Slo", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM and Engine pull in tokenizers and zmq; `import headway` alone stays cheap.
    if name in {"LLM", "Engine"}:
        from headway.engine import api

        return getattr(api, name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
