"""Steps of a whole model as they are served: two deep, of all kinds, beside what the device allows.

A step begins before the last is over and is fed what that one samples, as ADR 8 has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.gpu_check.aims import LLAMA_8B_DECODES, LLAMA_8B_PROMPTS, Aim, judged
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.recordings import measure_recordings
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import load, pipelined_s, runner_of, step_times, steps_of
from benchmarks.gpu_check.sizes import ModelShape, Rows, Sizes
from benchmarks.gpu_check.steps import ALL_PARAMS, num_blocks_of
from benchmarks.gpu_check.swaps import measure_swaps
from benchmarks.gpu_check.work import ModelWork
from executor_service.backends import Compute
from executor_service.runner import ModelRunner
from executor_service.steps import SamplingParams

# Others than those that aims are about.
_ODD_BATCHES = (8, 17, 20, 24, 64, 128)
_LONG = 131_000
_UNEVEN: dict[str, Rows] = {
    "31 rows of 1k and one of 128k": ((1023, 1),) * 31 + ((_LONG, 1),),
    "4 decodes at 128k": ((_LONG, 1),) * 4,
    "4 decodes at 128k beside 256 tokens of a prompt": ((_LONG, 1),) * 4 + ((0, 256),),
    "32 decodes at 8k": ((8191, 1),) * 32,
}
_NUM_SWAPPED_BLOCKS = 256


def small_cases(sizes: Sizes) -> Iterator[Case]:
    """Of the small model."""
    return _cases(sizes.small_model, sizes)


def large_cases(sizes: Sizes) -> Iterator[Case]:
    """Of the large one."""
    return _cases(sizes.large_model, sizes)


def packed_cases(sizes: Sizes) -> Iterator[Case]:
    """Of the large one with matrices in 4 bits: fewer steps."""
    plain = sizes.large_model
    model = _Model(replace(plain, name=f"{plain.name} in 4 bits", is_int4=True), sizes)
    embedding_bytes = plain.options["hidden_size"] * plain.options["vocab_size"] * 2
    num_plain_bytes = model.work.weight_bytes + embedding_bytes
    num_bytes = model.compute.loaded.weights_bytes
    model.work = replace(model.work, weight_bytes=num_bytes - embedding_bytes)
    yield Case("what runs it", 1, partial(_describe, model))
    yield Case("its bytes", 1, partial(_share_of_bytes, num_bytes, num_plain_bytes, sizes))
    most_rows = max(sizes.batches) + 1
    widest: Rows = ((sizes.model_context + 200, 1),) * most_rows
    num_blocks = num_blocks_of(widest, model.compute.block_size)
    is_recorded = model.compute.is_recordable
    with runner_of(model.compute, num_blocks, most_rows, sizes, is_recorded=is_recorded) as runner:
        for batch in sizes.batches:
            name = f"{batch} rows, greedy"
            yield Case(name, 6, partial(_decodes, model, runner, name, batch, "greedy", None))
        name, rows = "a prompt a step", ((0, sizes.num_prompt_tokens),)
        yield Case(name, 6, partial(_prompts, model, runner, name, rows, None))


def _share_of_bytes(num_bytes: int, num_plain_bytes: int, sizes: Sizes) -> Iterator[Measurement]:
    share = num_bytes / num_plain_bytes
    note = f"{num_bytes / 2**30:.2f} GiB"
    is_met = None if sizes.is_smoke else share < 0.6
    yield Measurement("bytes of plain weights", share, "times", is_met=is_met, note=note)


class _Model:
    """A model whose steps are measured. `compute` is there when cases run."""

    def __init__(self, shape: ModelShape, sizes: Sizes) -> None:
        self.shape = shape
        self.sizes = sizes
        self.work = ModelWork.of(shape, sizes.dtype.itemsize)
        rates_of(sizes)
        self.compute: Compute = load(shape, sizes)

    def most_tokens(self) -> int:
        """The longest row that it takes."""
        return int(self.shape.options["max_position_embeddings"]) - 200

    def pipelined(
        self,
        runner: ModelRunner,
        rows: Rows,
        params: SamplingParams,
    ) -> tuple[float, str]:
        """Seconds of a step, and a note on what the device allows."""
        rows = tuple((min(computed, self.most_tokens()), new) for computed, new in rows)
        seconds = pipelined_s(runner, steps_of(runner, rows, params), self.sizes.num_steps)
        note = self.work.floor(rows, rates_of(self.sizes)).note(seconds)
        if num_blocks_of(rows, runner.cache.block_size) > runner.cache.num_device_blocks:
            note += "; rows share blocks: not all fit"
        return seconds, note


def _cases(shape: ModelShape, sizes: Sizes) -> Iterator[Case]:
    model = _Model(shape, sizes)
    yield Case("what runs it", 1, partial(_describe, model))
    yield Case("recordings", 40, partial(measure_recordings, model.compute, sizes))
    block_size = model.compute.block_size
    most_rows = max(sizes.batches) + 1
    widest: Rows = ((sizes.model_context + 200, 1),) * most_rows
    num_blocks = num_blocks_of(widest, block_size) + 2 * _NUM_SWAPPED_BLOCKS
    with runner_of(
        model.compute,
        num_blocks,
        most_rows,
        sizes,
        is_recorded=model.compute.is_recordable,
        num_host_blocks=_NUM_SWAPPED_BLOCKS,
    ) as runner:
        yield from _decode_cases(model, runner)
        yield from _prompt_cases(model, runner)
        yield Case("swaps", 10, partial(measure_swaps, runner, _NUM_SWAPPED_BLOCKS, sizes))
    if not model.compute.is_recordable:
        return
    with runner_of(model.compute, num_blocks, most_rows, sizes, is_recorded=False) as runner:
        for batch in sizes.batches:
            name = f"{batch} rows, greedy, nothing recorded"
            yield Case(name, 5, partial(_decodes, model, runner, name, batch, "greedy", None))


def _describe(model: _Model) -> Iterator[Measurement]:
    yield Measurement(f"{model.shape.name} runs with", model.compute.description)


def _decode_cases(model: _Model, runner: ModelRunner) -> Iterator[Case]:
    sizes = model.sizes
    is_large = model.shape is sizes.large_model
    for kind in ALL_PARAMS:
        for batch in sizes.batches:
            aims = LLAMA_8B_DECODES if is_large and kind in ("greedy", "top-p") else {}
            name = f"{batch} rows, {kind}"
            run = partial(_decodes, model, runner, name, batch, kind, aims.get(batch))
            yield Case(name, 6, run)
    for batch in () if sizes.is_smoke else _ODD_BATCHES:
        name = f"{batch} rows, greedy"
        yield Case(name, 5, partial(_decodes, model, runner, name, batch, "greedy", None))
    for batch in sizes.batches:
        name = f"{batch} rows, one step at a time"
        yield Case(name, 5, partial(_one_at_a_time, model, runner, name, batch))
    for name, rows in _UNEVEN.items():
        yield Case(name, 15, partial(_step_ms, model, runner, name, sizes.rows(rows)))


def _prompt_cases(model: _Model, runner: ModelRunner) -> Iterator[Case]:
    sizes = model.sizes
    for batch in sizes.batches:
        for chunk in sizes.chunks:
            rows: Rows = ((sizes.model_context, 1),) * batch + ((0, chunk),)
            name = f"{batch} decodes beside {chunk} tokens of a prompt"
            yield Case(name, 6, partial(_step_ms, model, runner, name, rows))
    aim = LLAMA_8B_PROMPTS if model.shape is sizes.large_model else None
    prompts: dict[str, Rows] = {
        "a prompt a step": ((0, sizes.num_prompt_tokens),),
        "8 prompts a step": ((0, sizes.num_prompt_tokens // 8),) * 8,
    }
    for name, rows in prompts.items():
        yield Case(name, 6, partial(_prompts, model, runner, name, rows, aim))
    long = min(15 * sizes.num_prompt_tokens, model.most_tokens() // 2)
    name = f"{sizes.num_prompt_tokens} tokens of a prompt behind {long}"
    behind: Rows = ((long, sizes.num_prompt_tokens),)
    yield Case(name, 8, partial(_prompts, model, runner, name, behind, None))


def _decodes(
    model: _Model, runner: ModelRunner, name: str, batch: int, kind: str, aim: Aim | None
) -> Iterator[Measurement]:
    rows: Rows = ((model.sizes.model_context, 1),) * batch
    seconds, note = model.pipelined(runner, rows, ALL_PARAMS[kind])
    yield judged(name, batch / seconds, "tokens/s", aim, model.sizes, note)


def _step_ms(model: _Model, runner: ModelRunner, name: str, rows: Rows) -> Iterator[Measurement]:
    seconds, note = model.pipelined(runner, rows, ALL_PARAMS["greedy"])
    yield Measurement(name, seconds * 1e3, "ms a step", note=note)


def _prompts(
    model: _Model, runner: ModelRunner, name: str, rows: Rows, aim: Aim | None
) -> Iterator[Measurement]:
    seconds, note = model.pipelined(runner, rows, ALL_PARAMS["greedy"])
    num_tokens = sum(new for _, new in rows)
    yield judged(f"{name}, prompt", num_tokens / seconds, "tokens/s", aim, model.sizes, note)


def _one_at_a_time(
    model: _Model, runner: ModelRunner, name: str, batch: int
) -> Iterator[Measurement]:
    rows: Rows = ((model.sizes.model_context, 1),) * batch
    times = step_times(runner, steps_of(runner, rows), model.sizes.num_steps)
    parts: dict[str, float] = {
        "forward": times.forward_s,
        "sampling": times.sample_s,
        "gap": times.gap_s,
    }
    for part, seconds in parts.items():
        yield Measurement(f"{name}: {part}", seconds * 1e3, "ms")
