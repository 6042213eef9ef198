"""What a Python program uses of the engine."""

from __future__ import annotations

from headway.core.request import RequestError, SamplingParams, Slo, Unattainable
from headway.engine.async_engine import Engine
from headway.engine.config import EngineConfig
from headway.engine.llm import LLM, Completion, CompletionOutput
from headway.engine.messages import EngineStats
from headway.engine.stream import Choice, Delta, EngineDead, GenerationError, Stream
from headway.engine.validation import QueueFull

__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "GenerationError",
    "QueueFull",
    "RequestError",
    "SamplingParams",
    "Slo",
    "Stream",
    "Unattainable",
]
