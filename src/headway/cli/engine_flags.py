"""The flags that set up an engine, spelled as vLLM spells them, and the EngineConfig that they make."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from headway.cli.errors import UsageError
from headway.cli.values import memory_size, milliseconds, nonnegative, positive, share, swap_size
from headway.core import policies
from headway.core.config import ADMISSIONS, SchedulerConfig
from headway.core.policies import POLICIES
from headway.core.presets import PRESETS
from headway.core.strategies import BUDGETS, FORMATIONS, PREEMPTIONS, RESERVATIONS, WINDOWS
from headway.engine.config import EngineConfig

_DEFAULTS = {field.name: field.default for config in (EngineConfig, SchedulerConfig) for field in fields(config)}

MODEL_HELP = "a folder in Hugging Face layout, a .gguf file, or smollm2, the embedded model (the default)"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags; one that is not given is None, so that its config's own default holds."""
    group = parser.add_argument_group("model and memory")
    _add(group, "--dtype", "of weights and KV; auto is bfloat16", choices=["auto", "bfloat16", "float32"])
    _add(group, "--device", "cpu or cuda", metavar="NAME")
    _add(group, "--threads", "CPU threads of the engine (default: one a core)", type=positive, metavar="N")
    _add(group, "--kernels", "native CPU kernels or torch's", choices=["auto", "native", "torch"])
    _add(group, "--quantization", "round the weights to int8 at load (native kernels)", choices=["int8"])
    _add(group, "--max-model-len", "longest prompt and output together", type=positive, metavar="TOKENS")
    _add(group, "--kv-cache-memory", "of the KV pool: 4G, 512MiB ...", type=memory_size, metavar="SIZE")
    _add(
        group,
        "--swap-space",
        "of the host's memory for KV that is swapped out: GiB, or 512M ...; 0 is none (default 4, or a quarter of what "
        "is free)",
        type=swap_size,
        metavar="SIZE",
    )
    _add(group, "--gpu-memory-utilization", "share of a GPU's memory to use", type=share, metavar="SHARE")
    _add(group, "--block-size", "tokens in a KV block", type=positive, metavar="TOKENS")

    group = parser.add_argument_group("strategies")
    _add(group, "--preset", "flags that belong together; those you give win", choices=list(PRESETS))
    _add(group, "--batching", "when requests join a batch", choices=list(FORMATIONS))
    _add(group, "--static-timeout", "how long static waits for a full group", type=nonnegative, metavar="S")
    _add(group, "--max-wait-ms", "... and dynamic (default 50)", type=milliseconds, dest="max_wait", metavar="MS")
    _add(group, "--wait-window", "wait that long, or only while it gains more than it loses", choices=list(WINDOWS))
    _switch(group, "--length-clusters", "length_clusters", "group requests of like lengths (static, dynamic)", on=True)
    _add(
        group,
        "--cluster-wait-ms",
        "how long one may be passed over for that (default 30000)",
        type=milliseconds,
        dest="cluster_wait",
        metavar="MS",
    )
    names = f"{', '.join(POLICIES)}; aged:NAME; or one of your own, file.py:Class"
    _add(group, "--policy", f"who goes first: {names}", metavar="NAME")
    _add(group, "--budget", "how a step's tokens are shared out", choices=list(BUDGETS))
    _add(
        group,
        "--tpot-slo-ms",
        "per token, kept by the latency budget (default 50)",
        type=milliseconds,
        dest="tpot_slo",
        metavar="MS",
    )
    _add(
        group,
        "--preemption",
        "the KV of who must leave is computed again, or swapped out to the host; auto: whichever is cheaper",
        choices=list(PREEMPTIONS),
    )
    _add(group, "--kv-reservation", "what admission keeps free for answers", choices=list(RESERVATIONS))
    _add(group, "--admission", "of those whose promise is predicted to be missed", choices=list(ADMISSIONS))
    _switch(group, "--no-chunked-prefill", "chunked_prefill", "compute each prompt whole, not in chunks")
    _switch(group, "--no-backfill", "backfill", "pass nobody by who does not fit yet")
    _switch(group, "--no-prefix-caching", "prefix_caching", "compute known beginnings of prompts again")

    group = parser.add_argument_group("limits")
    _add(group, "--max-batch-size", "rows computed in one step", type=positive, metavar="N")
    _add(group, "--max-num-batched-tokens", "tokens computed in one step", type=positive, metavar="N")
    _add(group, "--max-num-seqs", "requests holding KV (default: two a row)", type=positive, metavar="N")
    _add(group, "--burst-size", "requests admitted in one step (default: any)", type=positive, metavar="N")
    _add(group, "--max-num-partial-prefills", "prompts in chunks at a time", type=positive, metavar="N")
    _add(group, "--depth", "steps launched before the first is collected", type=int, choices=[1, 2])


def _add(group: argparse._ArgumentGroup, flag: str, text: str, **how: Any) -> None:
    default = _DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
    group.add_argument(flag, help=text if default is None else f"{text} (default {default})", **how)


def _switch(group: argparse._ArgumentGroup, flag: str, dest: str, text: str, *, on: bool = False) -> None:
    group.add_argument(flag, help=text, dest=dest, action="store_const", const=on)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags ask for.

    A limit that is not given follows those that are: fewer sequences or tokens than the default batch make the batch
    as small, and a batch larger than the default token budget raises the budget. A preset changes the defaults, and
    what it sets is told on stderr.

    Raises:
        UsageError: values that contradict each other.
    """
    limits = _given(args, SchedulerConfig)
    preset = [setting for setting in PRESETS.get(args.preset, ()) if setting.field not in limits]
    default = _DEFAULTS | {setting.field: setting.value for setting in preset}
    bounds = [limits[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in limits]
    if bounds:
        limits.setdefault("max_batch_size", min(default["max_batch_size"], *bounds))
    if "max_batch_size" in limits:
        budget = max(default["max_num_batched_tokens"], limits["max_batch_size"])
        limits.setdefault("max_num_batched_tokens", budget)
    preset = [setting for setting in preset if setting.field not in limits]
    for setting in preset:
        print(f"preset {args.preset}: {setting.flag:<32} {setting.why}", file=sys.stderr)
    limits |= {setting.field: setting.value for setting in preset}
    try:
        if args.policy is not None:
            policies.make(args.policy)
        return EngineConfig(**_given(args, EngineConfig), scheduler=SchedulerConfig(**limits))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    return {name: value for name, value in vars(args).items() if name in names and value is not None}
