"""Command `splitserve info`: the model, the executors and their KV pools."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from splitserve_cli.command_line import add_operators_server, aligned, ask, operators_config, run
from splitserve_client import (
    Adapter,
    AsyncClient,
    CallerNotAllowed,
    CallerUnknown,
    Executor,
    ExecutorList,
    Model,
    ModelNotReady,
)
from splitserve_common import printable
from splitserve_text import SamplingParams, SplitserveError

# Texts shown in place of the model.
_NONE_YET = "none yet; no executor has registered"
_MAX_NAMED = 8
_NOT_SHOWN = "not shown; it needs a credential of the scope generate or operator"


def state_of(executor: Executor) -> str:
    """Returns the state of an executor as one word."""
    if not executor.is_connected:
        return "lost"
    if executor.is_withdrawn:
        return "withdrawn"
    if executor.is_failing:
        return "failing"
    return "draining" if executor.is_draining else "connected"


# Columns of the table, with functions that return their values; numbers are right-aligned.
_TEXTS: Mapping[str, Callable[[Executor], str]] = MappingProxyType(
    {
        "EXECUTOR": lambda executor: printable(executor.address),
        "STATE": state_of,
        "COMPUTE": lambda executor: printable(executor.compute) or "unknown",
    }
)
_NUMBERS: Mapping[str, Callable[[Executor], object]] = MappingProxyType(
    {
        "RUNNING": lambda executor: executor.num_running_requests,
        "WAITING": lambda executor: executor.num_waiting_requests,
        "SWAPPED": lambda executor: executor.num_swapped_requests,
        "FREE BLOCKS": lambda executor: (
            f"{executor.num_free_device_blocks} of {executor.num_device_blocks}"
        ),
        "CACHED": lambda executor: executor.num_cached_device_blocks,
        "FREE ON HOST": lambda executor: (
            f"{executor.num_free_host_blocks} of {executor.num_host_blocks}"
        ),
        "BLOCK SIZE": lambda executor: executor.block_size,
        "STEPS": lambda executor: executor.num_steps,
        "PREEMPTIONS": lambda executor: executor.num_preemptions,
    }
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve info", description="Shows the model, the executors and their KV pools."
    )
    add_operators_server(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    return run("info", lambda: _show(arguments))


async def _show(arguments: argparse.Namespace) -> int:
    config = operators_config(arguments)
    async with AsyncClient(arguments.address, config) as client:
        model, adapters = await _model(client), await _adapters(client)
    executors = await ask(arguments, config, lambda operators: operators.list_executors())
    show = _json if arguments.json else _table
    sys.stdout.write(show(model, adapters, executors))
    return 0


async def _model(client: AsyncClient) -> Model | str:
    """Returns the served model, or why it is not shown.

    A certificate alone permits listing executors, but not the model.
    """
    try:
        return await client.get_model()
    except ModelNotReady:
        return _NONE_YET
    except (CallerUnknown, CallerNotAllowed):
        return _NOT_SHOWN


async def _adapters(client: AsyncClient) -> tuple[Adapter, ...]:
    """Returns the registered adapters; none where they are not shown, as the model."""
    try:
        return await client.list_adapters()
    except (CallerUnknown, CallerNotAllowed):
        return ()
    except SplitserveError as error:
        # An earlier scheduler, or the address for operators.
        if error.reason != "METHOD_UNKNOWN":
            raise
        return ()


def _json(model: Model | str, adapters: Sequence[Adapter], executors: ExecutorList) -> str:
    entries = []
    for executor in executors.executors:
        entry = asdict(executor)
        entry["connected"] = entry.pop("is_connected")
        for name in ("draining", "failing", "withdrawn"):
            entry[name] = entry.pop(f"is_{name}")
        entries.append(entry)
    content = {
        "model": _model_entry(model) if isinstance(model, Model) else None,
        "adapters": list(map(asdict, adapters)),
        "executors": entries,
        "num_unassigned_requests": executors.num_unassigned_requests,
        "num_unfitting_requests": executors.num_unfitting_requests,
    }
    return json.dumps(content) + "\n"


def _model_entry(model: Model) -> dict[str, Any]:
    return {
        **asdict(model),
        "default_sampling_params": _recommended(model),
        "readiness": model.readiness.value,
    }


def _weights(model: Model) -> str:
    """Returns the data type of the model, and the format of its checkpoint if that is quantised."""
    return f"{model.dtype} from {model.quantization}" if model.quantization else model.dtype


def _recommended(model: Model) -> dict[str, float]:
    """Returns the sampling parameters that the model's authors recommend."""
    params = asdict(model.default_sampling_params)
    neutral = asdict(SamplingParams())
    return {name: value for name, value in params.items() if value != neutral[name]}


def _table(model: Model | str, adapters: Sequence[Adapter], executors: ExecutorList) -> str:
    if isinstance(model, str):
        lines = [f"model: {model}"]
    else:
        lines = [
            printable(f"model: {model.name} ({_weights(model)}, digest {model.digest[:12]})"),
            f"vocabulary: {model.vocab_size} tokens; sequences: up to {model.max_model_len} tokens",
        ]
        if recommended := _recommended(model):
            values = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
            lines.append(f"recommended sampling parameters: {values}")
    if adapters:
        names = [each.name for each in adapters[:_MAX_NAMED]]
        more = len(adapters) - len(names)
        lines.append(printable(f"adapters: {', '.join(names)}") + (f", {more} more" * bool(more)))
    if executors.executors:
        lines += ["", *_rows(executors.executors), *_slow(executors.executors)]
    if executors.num_unassigned_requests:
        line = f"requests waiting for an executor: {executors.num_unassigned_requests}"
        if executors.num_unfitting_requests:
            line += f", {executors.num_unfitting_requests} of them fit no registered executor"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _rows(executors: Sequence[Executor]) -> list[str]:
    """Returns the headings and a line for each executor."""
    columns = [
        aligned([heading, *map(str, map(value, executors))], alignment)
        for values, alignment in ((_TEXTS, "<"), (_NUMBERS, ">"))
        for heading, value in values.items()
    ]
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def _slow(executors: Sequence[Executor]) -> list[str]:
    """Returns a line for each executor whose implementation is not the fastest for its model."""
    return [
        printable(f"{each.address} computes slowly: {each.slow_compute_reason}")
        for each in executors
        if each.slow_compute_reason
    ]
