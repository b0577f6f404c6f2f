"""Adapters: are the kernels right, and what do they add to a layer and to a step?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.backends import flash_attention_3_source
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.models import load_random
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import StepAt, pipelined_s, release_models, runner_of, steps_of
from benchmarks.gpu_check.sizes import Rows, Sizes
from benchmarks.gpu_check.steps import num_blocks_of
from benchmarks.gpu_check.timing import median_s, recorded
from executor_service.adapters import find_targets
from executor_service.backends import choose_compute
from executor_service.model import AdapterLimits, AddLowRank, LoadedModel, slots_of
from executor_service.runner import ModelRunner
from executor_service.steps import StepInput
from executor_service.trials import try_low_rank
from splitserve_kernels.adapter_tiles import PackedSlot, SlotLinear, TokenTiles, lay_out_tiles
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.low_rank_update import LowRankUpdate

# Matrices of a layer of an 8B Llama that are multiplied as one: inputs, and outputs of each part.
_LINEARS = (
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
)
_LIMITS = AdapterLimits(max_num=8, max_rank=64)
_RANKS = (8, 16, 64)
_ROWS = (1, 32, 256, 2048)
_NUM_ADAPTERS = (1, 8)
_RANK_OF_STEPS = 16
# That of the trial at start.
_TOLERANCE = 4 * torch.finfo(torch.bfloat16).eps


def cases(sizes: Sizes) -> Iterator[Case]:
    """Kernels, then whole steps."""
    if why_unavailable() is not None:
        return
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Case(f"trial in {dtype}", 10, partial(_try, dtype, sizes))
    for rank in _RANKS[:1] if sizes.is_smoke else _RANKS:
        yield Case(f"rank {rank}", 20, partial(_measure_layer, rank, sizes))
    yield Case(sizes.large_model.name, 90, partial(_measure_steps, sizes))


def _add() -> AddLowRank:
    from splitserve_kernels.gpu.low_rank import add_low_rank

    return add_low_rank


def _try(dtype: torch.dtype, sizes: Sizes) -> Iterator[Measurement]:
    try_low_rank(_add(), dtype, sizes.device)
    yield Measurement(f"trial in {dtype}", "passed", is_met=True)


@dataclass(frozen=True, slots=True)
class _Problem:
    """A fused layer with random updates in all slots. `kept`: keeps their memory."""

    slots: list[list[LowRankUpdate]]
    linear: SlotLinear
    kept: list[PackedSlot]
    num_inputs: int

    @classmethod
    def of(cls, num_inputs: int, outputs: tuple[int, ...], rank: int, sizes: Sizes) -> _Problem:
        def random(rows: int, columns: int) -> Tensor:
            numbers = torch.randn(rows, columns, device=sizes.device).mul_(columns**-0.5)
            return numbers.to(torch.bfloat16)

        num_inputs = num_inputs // sizes.divisor
        outputs = tuple(size // sizes.divisor for size in outputs)
        slots = [
            [LowRankUpdate(random(rank, num_inputs), random(size, rank), 2.0) for size in outputs]
            for _ in range(_LIMITS.max_num)
        ]
        kept = [PackedSlot(parts) for parts in slots]
        words = torch.stack([each.words for each in kept]).to(sizes.device)
        return cls(slots, SlotLinear(words, outputs, _LIMITS.max_rank), kept, num_inputs)

    def rows(self, num_rows: int, num_slots: int) -> tuple[Tensor, Tensor, TokenTiles]:
        """Returns inputs, outputs before, and the tiles of rows whose slots take turns."""
        device = self.linear.words.device
        x = torch.randn(num_rows, self.num_inputs, device=device).to(torch.bfloat16)
        output = torch.randn(num_rows, sum(self.linear.sizes), device=device).to(torch.bfloat16)
        order, tiles = lay_out_tiles(np.arange(num_rows, dtype=np.int32) % num_slots)
        on_device = (torch.from_numpy(each).to(device) for each in (order, tiles))
        return x, output, TokenTiles(*on_device)


@torch.inference_mode()
def _measure_layer(rank: int, sizes: Sizes) -> Iterator[Measurement]:
    torch.manual_seed(0)
    problems = [_Problem.of(inputs, outputs, rank, sizes) for inputs, outputs in _LINEARS]
    error, num_changed = 0.0, 0
    for problem in problems:
        of_problem, changed = _errors(problem, 5 if sizes.is_smoke else 300)
        error, num_changed = max(error, of_problem), num_changed + changed
    aim = f"at most {_TOLERANCE:.3g}"
    yield Measurement(f"rank {rank}", error, "error", aim, error <= _TOLERANCE)
    name = f"rank {rank}, rows whose bits depend on others"
    yield Measurement(name, num_changed, "rows", "none", num_changed == 0)
    for num_rows in _ROWS[:1] if sizes.is_smoke else _ROWS:
        for num_slots in (each for each in _NUM_ADAPTERS if each <= num_rows):
            time_s = _layer_s(problems, num_rows, num_slots, sizes)
            line = f"rank {rank}, {num_rows} rows, {num_slots} adapters"
            yield Measurement(line, time_s * 1e6, "us a layer")


def _errors(problem: _Problem, num_rows: int) -> tuple[float, int]:
    """Returns the largest error, as the trial has it, and how many rows differ when alone."""
    x, own, tiles = problem.rows(num_rows, _LIMITS.max_num)
    output = own.clone()
    _add()(x, output, tiles, problem.linear, None)
    expected = own.double()
    for row in range(num_rows):
        parts = problem.slots[row % _LIMITS.max_num]
        numbers = x[row].double()
        expected[row] += torch.cat(
            [each.scale * each.up.double() @ (each.down.double() @ numbers) for each in parts]
        )
    num_changed = 0
    for row in range(0, num_rows, 7):
        alone = own[row : row + 1].clone()
        slots = np.array([row % _LIMITS.max_num], np.int32)
        order, places = (torch.from_numpy(t).to(x.device) for t in lay_out_tiles(slots))
        _add()(x[row : row + 1], alone, TokenTiles(order, places), problem.linear, None)
        num_changed += not torch.equal(alone[0], output[row])
    error = (output.double() - expected).abs() / (1 + expected.abs())
    return float(error.max()), num_changed


def _layer_s(problems: list[_Problem], num_rows: int, num_slots: int, sizes: Sizes) -> float:
    """Seconds of the updates of all matrices of a layer."""
    rows = [(problem, *problem.rows(num_rows, num_slots)) for problem in problems]

    def run() -> None:
        for problem, x, output, tiles in rows:
            _add()(x, output, tiles, problem.linear, None)

    run()  # compiles
    return median_s(recorded(run, sizes.device), sizes.device, sizes.num_runs)


def _measure_steps(sizes: Sizes) -> Iterator[Measurement]:
    """Decodes of a model, recorded, without and with adapters."""
    release_models()
    compute = choose_compute(
        partial(_load, sizes),
        sizes.backend,
        None,
        flash_attention_3=flash_attention_3_source(),
    )
    batches = sizes.batches
    widest: Rows = ((sizes.model_context + 100, 1),) * batches[-1]
    num_blocks = num_blocks_of(widest, compute.block_size)
    with runner_of(
        compute, num_blocks, batches[-1], sizes, is_recorded=compute.is_recordable
    ) as runner:
        names = _load_adapters(runner)
        if not names:
            return  # no kernels apply them
        for batch in batches:
            rows: Rows = ((sizes.model_context, 1),) * batch
            step_at = steps_of(runner, rows)
            plain_s = pipelined_s(runner, step_at, sizes.num_steps)
            line = f"{sizes.large_model.name}, {batch} rows"
            yield Measurement(f"{line}, no adapter", plain_s * 1e3, "ms a step")
            for number in (each for each in _NUM_ADAPTERS if each <= batch):
                adapted = _with_adapters(step_at, names[:number])
                time_s = pipelined_s(runner, adapted, sizes.num_steps)
                note = f"{time_s / plain_s:.2f} times as long as without"
                name = f"{line}, {number} adapters"
                yield Measurement(name, time_s * 1e3, "ms a step", note=note)


def _load(sizes: Sizes) -> LoadedModel:
    loaded = load_random(sizes.large_model, sizes)
    targets = find_targets(loaded.model)
    return replace(loaded, adapter_targets=targets, adapter_limits=_LIMITS)


def _load_adapters(runner: ModelRunner) -> list[str]:
    """Returns the names of new random adapters; none if the model has no slots."""
    slots = slots_of(runner.model)
    if slots is None:
        return []
    adapters = [slots.random_adapter(i, _RANK_OF_STEPS) for i in range(_LIMITS.max_num)]
    runner.adapters.by_name = {adapter.name: adapter for adapter in adapters}
    return list(runner.adapters.by_name)


def _with_adapters(step_at: StepAt, names: list[str]) -> StepAt:
    """Returns the same steps, whose rows have the adapters in turn."""

    def step(index: int) -> StepInput:
        made = step_at(index)
        return replace(made, adapters=[names[row % len(names)] for row in range(made.num_rows)])

    return step
