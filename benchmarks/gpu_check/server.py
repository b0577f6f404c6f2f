"""The server itself on the GPU: streams through gRPC, greedy and cut, with and without arrivals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu_check.aims import (
    LLAMA_8B_DECODES,
    NO_COMPILATION,
    START_S,
    Aim,
    judged,
)
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.checkpoints import work_folder, write_checkpoint
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.served import Served, serving
from benchmarks.gpu_check.sizes import ModelShape, Sizes
from benchmarks.gpu_check.streams import Streams, measure
from executor_service.checkpoint import resolve_checkpoint
from executor_service.engine_loader import BUNDLED_DIRECTORY

_WINDOW_S = 5.0
_START_TIMEOUT_S = 240.0
# Streams that are never over in a window, and such that end and are replaced all the time.
_LONG_OUTPUT, _SHORT_OUTPUT = 3000, 128
_BREAKING = "a recording that breaks off"


def bundled_cases(sizes: Sizes) -> Iterator[Case]:
    """The bundled model: that it serves at all, and what becomes of a recording that fails."""
    with work_folder() as folder:
        yield Case("the bundled model", 60, partial(_bundled, folder, sizes, False))
        if not sizes.is_smoke:  # a CPU records nothing
            yield Case(_BREAKING, 90, partial(_bundled, folder, sizes, True))


def small_cases(sizes: Sizes) -> Iterator[Case]:
    """A random model of 0.6B, and one whose requests are preempted."""
    return _cases(sizes.small_model, sizes, preempts=True)


def large_cases(sizes: Sizes) -> Iterator[Case]:
    """A random model of 8B."""
    return _cases(sizes.large_model, sizes, preempts=False)


def _bundled(folder: Path, sizes: Sizes, breaks: bool) -> Iterator[Measurement]:
    name = _BREAKING if breaks else "the bundled model"
    config = resolve_checkpoint(str(BUNDLED_DIRECTORY)).config
    with serving(
        "bundled",
        folder / name.replace(" ", "-"),
        _START_TIMEOUT_S,
        ("--device", sizes.device.type, *_fixed_blocks(sizes)),
        breaks_recordings=breaks,
    ) as served:
        yield Measurement(f"{name}: start", served.start_s, "s")
        streams = Streams(
            max(2, sizes.batches[1]), 16, sizes.stream_tokens, False, config["vocab_size"]
        )
        rate, _ = asyncio.run(measure(served.address, streams, _window_s(sizes)))
        yield Measurement(f"{name}: {streams.num_streams} streams", rate, "tokens/s")
        if breaks and sizes.device.type == "cuda":
            started_again = "cuda_graphs_failed" in served.log
            line = f"{name}: starts again without recordings"
            yield Measurement(line, str(started_again), is_met=started_again)


def _fixed_blocks(sizes: Sizes) -> tuple[str, ...]:
    if not sizes.is_smoke:
        return ()
    return ("--num-device-blocks", "64", "--num-host-blocks", "0", "--attention-backend", "torch")


def _cases(shape: ModelShape, sizes: Sizes, *, preempts: bool) -> Iterator[Case]:
    rates_of(sizes)
    with work_folder() as folder, ExitStack() as stack:
        model = folder / "model"
        yield Case(f"{shape.name} written", 60, partial(write_checkpoint, shape, model, sizes))
        if not model.is_dir():
            return
        started: list[Served] = []
        yield Case("start", 120, partial(_start, stack, started, model, sizes))
        if not started:
            return
        served = started[0]
        for is_cut in (False, True):
            for arrives in (False, True):
                kind = "top-p" if is_cut else "greedy"
                kind += ", prompts arrive" if arrives else ", all decode"
                for num_streams in sizes.batches:
                    name = f"{num_streams} streams, {kind}"
                    streams = _streams(num_streams, shape, sizes, is_cut=is_cut, arrives=arrives)
                    aim = None
                    if shape is sizes.large_model and not arrives:
                        aim = LLAMA_8B_DECODES.get(num_streams)
                    run = partial(_load, name, served, streams, aim, sizes)
                    yield Case(name, 30 if num_streams > 100 else 15, run)
        yield Case("compiled while serving", 1, partial(_compiled, served, sizes))
        stack.close()
        if preempts:
            for mode in ("swap",) if sizes.is_smoke else ("swap", "recompute"):
                run = partial(_preempted, mode, model, folder, shape, sizes)
                yield Case(f"preempted, {mode}", 90, run)


def _start(
    stack: ExitStack, started: list[Served], model: Path, sizes: Sizes
) -> Iterator[Measurement]:
    """`started` gets what runs until `stack` is closed."""
    context = serving(str(model), model.parent / "logs", _START_TIMEOUT_S, _fixed_blocks(sizes))
    served = stack.enter_context(context)
    started.append(served)
    note = f"{served.executor().num_device_blocks} blocks on the device"
    yield judged(
        "from the start of processes to serving", served.start_s, "s", START_S, sizes, note
    )


def _streams(
    num_streams: int, shape: ModelShape, sizes: Sizes, *, is_cut: bool, arrives: bool
) -> Streams:
    vocab_size = int(shape.options["vocab_size"])
    if sizes.is_smoke:
        return Streams(num_streams, sizes.model_context, sizes.stream_tokens, is_cut, vocab_size)
    if arrives:
        return Streams(num_streams, sizes.model_context // 2, _SHORT_OUTPUT, is_cut, vocab_size)
    return Streams(num_streams, sizes.model_context, _LONG_OUTPUT, is_cut, vocab_size)


def _load(
    name: str, served: Served, streams: Streams, aim: Aim | None, sizes: Sizes
) -> Iterator[Measurement]:
    rate, seen = asyncio.run(measure(served.address, streams, _window_s(sizes)))
    gaps = _percentiles_ms(seen.gap_s)
    note = f"{streams.num_prompt_tokens} prompt tokens; next token {gaps} ms"
    yield judged(name, rate, "tokens/s", aim, sizes, note)
    note = f"{_percentiles_ms(seen.first_s)} ms (50th, 99th percentile, largest)"
    yield Measurement(f"{name}: first token", _median(seen.first_s) * 1e3, "ms", note=note)


def _compiled(served: Served, sizes: Sizes) -> Iterator[Measurement]:
    names = served.compiled_later
    note = ", ".join(sorted(set(names)))[:200]
    yield judged(
        "kernels compiled while serving", len(names), "kernels", NO_COMPILATION, sizes, note
    )


def _preempted(
    mode: str, model: Path, folder: Path, shape: ModelShape, sizes: Sizes
) -> Iterator[Measurement]:
    """Half as many blocks as the streams come to need."""
    streams = Streams(
        sizes.batches[1],
        sizes.model_context // 2,
        sizes.model_context // 2,
        False,
        int(shape.options["vocab_size"]),
    )
    needed = streams.num_streams * sizes.model_context // 16
    blocks = ("--num-device-blocks", str(max(4, needed // 2)), "--num-host-blocks", str(needed + 4))
    backend = ("--attention-backend", "torch") if sizes.is_smoke else ()
    with serving(
        str(model),
        folder / f"preempted-{mode}",
        _START_TIMEOUT_S,
        (*blocks, *backend),
        ("--preemption-mode", mode),
    ) as served:
        rate, seen = asyncio.run(measure(served.address, streams, 2 * _window_s(sizes)))
        num_preemptions = served.executor().num_preemptions
    note = f"{num_preemptions} preemptions; next token {_percentiles_ms(seen.gap_s)} ms"
    line = f"{streams.num_streams} streams with half the blocks, {mode}"
    yield Measurement(line, rate, "tokens/s", note=note)


def _window_s(sizes: Sizes) -> float:
    return 0.3 if sizes.is_smoke else _WINDOW_S


def _percentiles_ms(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    found = np.percentile(np.array(seconds) * 1e3, (50, 99, 100))
    return ", ".join(f"{each:.1f}" for each in found)


def _median(seconds: list[float]) -> float:
    return float(np.median(seconds)) if seconds else float("nan")
