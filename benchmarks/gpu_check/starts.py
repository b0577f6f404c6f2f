"""A start as an executor has it, with memory planned; and that no kernel is compiled after it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_check.aims import NO_COMPILATION, START_S, judged
from benchmarks.gpu_check.backends import flash_attention_3_source
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.checkpoints import work_folder, write_checkpoint
from benchmarks.gpu_check.compilations import counted
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import pipelined_s, steps_of
from benchmarks.gpu_check.sizes import ModelShape, Rows, Sizes
from benchmarks.gpu_check.steps import ALL_PARAMS
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine, load_engine
from executor_service.runner import ModelRunner
from splitserve_options import options

# What the log of a start says of its phases.
_PHASES = (
    "weights_loaded", "largest_step_measured", "cuda_graphs_recorded", "kernels_compiled",
)  # fmt: skip
_SECONDS = re.compile(r"\bseconds=([\d.]+)")
# Rows and tokens of prompts that are no powers of two and nobody tried at start.
_BATCHES = (1, 2, 5, 16, 31, 64, 200)
_CHUNKS = (2, 3, 6, 12, 20, 47, 130, 333, 1000, 2000)


def cases(sizes: Sizes) -> Iterator[Case]:
    """The first of each model has nothing in Triton's cache."""
    rates_of(sizes)
    with work_folder() as folder:
        shapes = ((sizes.small_model, 90), (sizes.large_model, 150))
        for shape, seconds in shapes[: 1 if sizes.is_smoke else 2]:
            path = folder / shape.name.replace(" ", "-")
            yield Case(f"{shape.name} written", 60, partial(write_checkpoint, shape, path, sizes))
            if not path.is_dir():
                continue
            flags = _flags(path, sizes)
            starts = {"first start": flags, "second start": flags}
            if shape is sizes.large_model and not sizes.is_smoke:
                starts = {
                    **starts,
                    "1024 host blocks": [*flags, "--num-host-blocks", "1024"],
                    "float8 KV": [*flags, "--kv-cache-dtype", "fp8"],
                }
            for name, wanted in starts.items():
                line = f"{shape.name}, {name}"
                yield Case(line, seconds, partial(_start, line, wanted, shape, sizes))


def _flags(path: Path, sizes: Sizes) -> list[str]:
    flags = ["--model", str(path), "--flash-attn-3-from", flash_attention_3_source()]
    return [*flags, "--attention-backend", "torch"] if sizes.is_smoke else flags


def _start(name: str, flags: list[str], shape: ModelShape, sizes: Sizes) -> Iterator[Measurement]:
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    heard = _Heard()
    logger = logging.getLogger("executor_service")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    started = time.perf_counter()
    try:
        with counted() as at_start:
            engine = load_engine(config, executor_epoch=1)
    finally:
        logger.setLevel(level)
        logger.removeHandler(heard)
    seconds = time.perf_counter() - started
    yield judged(f"{name}: from weights to serving", seconds, "s", START_S, sizes, engine.compute)
    for phase, phase_s in heard.phases.items():
        yield Measurement(f"{name}: {phase}", phase_s, "s")
    yield Measurement(f"{name}: memory", "planned", note=heard.plan)
    blocks = engine.info.num_device_blocks
    note = f"{blocks * engine.info.block_size} tokens; {engine.info.num_host_blocks} on the host"
    yield Measurement(f"{name}: blocks on the device", blocks, "blocks", note=note)
    yield Measurement(f"{name}: kernels compiled at start", len(at_start), "kernels")
    yield _compiled_later(name, engine, shape, sizes)


def _compiled_later(
    name: str, engine: LoadedEngine, shape: ModelShape, sizes: Sizes
) -> Measurement:
    """Steps of all sorts, at least one of each."""
    assert isinstance(engine.runner, ModelRunner), "no draft model"
    limit = engine.info.limits
    most = min(limit.max_num_batched_tokens, int(shape.options["max_position_embeddings"]) // 2)
    with counted() as compiled:
        for rows in _all_rows(sizes, most):
            for params in ALL_PARAMS.values():
                pipelined_s(engine.runner, steps_of(engine.runner, rows, params), 1)
    note = ", ".join(sorted(set(compiled)))[:200]
    line = f"{name}: kernels compiled while serving"
    return judged(line, len(compiled), "kernels", NO_COMPILATION, sizes, note)


def _all_rows(sizes: Sizes, most_tokens: int) -> Iterator[Rows]:
    context = sizes.model_context
    for batch in _BATCHES[:2] if sizes.is_smoke else _BATCHES:
        yield ((context, 1),) * batch
    for chunk in _CHUNKS[:2] if sizes.is_smoke else _CHUNKS:
        if chunk + 3 <= most_tokens:
            yield ((0, chunk),)
            yield ((context, 1), (context, 1), (context // 2 + 3, chunk))
            yield ((16, 2), (0, chunk))


class _Heard(logging.Handler):
    """The phases of a start, in seconds, and how its memory was planned."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.phases: dict[str, float] = {}
        self.plan = "not planned"

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what is asked for."""
        message = record.getMessage()
        event = message.partition(" ")[0]
        found = _SECONDS.search(message)
        if event in _PHASES and found is not None:
            # What is recorded for the trial of memory is recorded again for the real pools.
            self.phases[event] = self.phases.get(event, 0.0) + float(found[1])
        if event == "memory_planned":
            self.plan = message
