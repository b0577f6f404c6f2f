"""How many KV blocks fit, and a runner that has them."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor_service.device.kv_cache import (
    CopyBlocks,
    KVCache,
    LayerShape,
    block_bytes,
    copy_in_torch,
)
from executor_service.device.memory import (
    HostReservations,
    PeakMeter,
    available_host_bytes,
    format_bytes,
    is_out_of_memory,
    peak_meter_of,
    release_cached_memory,
)
from executor_service.errors import ExecutorError, OutOfMemory, RecordingFailed, StepFailed
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, torch_model
from executor_service.model.transformers_attention import unbind
from executor_service.runner.forward_pass import MAX_SCORED_TOKENS
from executor_service.runner.model_runner import ModelRunner
from executor_service.sampling.sampler import Adjust, Draw, adjust_in_torch, draw_in_torch
from executor_service.steps.block_tables import BlockTables
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from executor_service.steps.step import NO_MOVES, RowStatus, Runner, StepInput, execute_step

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the pools are made. Numbers of blocks that are None are made to fit.

    `memory_fraction`: on a GPU, of its memory, for weights, the largest step and the device pool;
    on a CPU, of the memory that is free now, for that step and the pool, which then takes at most
    `max_cpu_pool_bytes` (None: no such limit).
    `num_host_blocks`: 0 for no swapping. Fitting ones are as many as on the device, in at most
    `host_memory_fraction` of the host memory that the device pool leaves free.
    `max_auto_blocks`: of those that are made to fit. The scheduler keeps books on every block.
    `max_num_rows`, `max_num_batched_tokens`: of a pass; 0 for nothing to leave room for.
    `copy_blocks`: what copies within the device pool. `more_layers`: what another model has in the
    same blocks, behind the layers of the one that is served.
    """

    block_size: int = 16
    num_device_blocks: int | None = None
    num_host_blocks: int | None = None
    memory_fraction: float = 0.9
    max_cpu_pool_bytes: int | None = 4 * 2**30
    host_memory_fraction: float = 0.25
    max_auto_blocks: int = 2**17
    max_num_rows: int = 0
    max_num_batched_tokens: int = 0
    copy_blocks: CopyBlocks = copy_in_torch
    more_layers: tuple[LayerShape, ...] = ()


@dataclass(frozen=True, slots=True)
class _RunnerFactory:
    """What makes runners for `loaded`. `make_measured`: models that take as much memory."""

    loaded: LoadedModel
    cache_config: CacheConfig
    make_model: MakeModel
    make_measured: MakeModel
    draw: Draw
    adjust: Adjust

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Of one block."""
        return (*self.loaded.layers, *self.cache_config.more_layers)

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return block_bytes(self.layers, self.cache_config.block_size, self.loaded.kv_dtype)

    def cache(self, num_device_blocks: int, num_host_blocks: int) -> KVCache:
        """Allocates the pools. Raises OutOfMemory."""
        return KVCache(
            layers=self.layers,
            block_size=self.cache_config.block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            dtype=self.loaded.kv_dtype,
            device=self.loaded.device,
            copy_blocks=self.cache_config.copy_blocks,
            scales=self.loaded.kv_scales,
        )

    def runner(self, cache: KVCache) -> ModelRunner:
        """A runner on the pools of `cache`."""
        return self._runner(cache, self.make_model)

    def measured_runner(self, cache: KVCache) -> ModelRunner:
        """A runner that takes as much memory, and that nobody is served by."""
        return self._runner(cache, self.make_measured)

    def _runner(self, cache: KVCache, make_model: MakeModel) -> ModelRunner:
        model = make_model(self.loaded, cache)
        return ModelRunner(self.loaded, cache, model, self.draw, adjust=self.adjust)


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory where the model is, before the pools. `budget_bytes`: what pool and step may take.

    `host_bytes`: memory of this machine, before the pools. `step_bytes`: what the largest step
    takes; None if it was not measured.
    """

    free_bytes: int
    budget_bytes: int
    host_bytes: int
    step_bytes: int | None = None

    @property
    def pool_bytes(self) -> int:
        """What the device pool may take."""
        return self.budget_bytes - (self.step_bytes or 0)


def build_runner(
    loaded: LoadedModel,
    cache_config: CacheConfig,
    make_model: MakeModel = torch_model,
    draw: Draw = draw_in_torch,
    meter: PeakMeter | None = None,
    adjust: Adjust = adjust_in_torch,
    make_measured: MakeModel | None = None,
    reservations: HostReservations | None = None,
) -> ModelRunner:
    """Allocates the pools and makes a runner for `loaded`; `adjust` and `draw` choose tokens.

    Where the number of blocks is not given, it runs the largest step first, on what `make_measured`
    makes (None: `make_model`), and `meter` measures what that takes. `reservations`: of executors
    on this machine, which the pools join as long as they live; None for none. Raises OutOfMemory,
    with the numbers, if the pools, that step or a single block do not fit.
    """
    reservations = reservations or HostReservations()
    factory = _RunnerFactory(
        loaded, cache_config, make_model, make_measured or make_model, draw, adjust
    )
    with reservations.planning():
        room = _free_room(loaded, cache_config, reservations)
    if _must_measure(loaded.device, cache_config, room):
        step_bytes = _measure_step(
            factory, cache_config, room, meter or peak_meter_of(loaded.device)
        )
        room = replace(room, step_bytes=step_bytes)
        release_cached_memory(loaded.device)
    with reservations.planning():
        # Others may have reserved meanwhile.
        room = replace(_free_room(loaded, cache_config, reservations), step_bytes=room.step_bytes)
        num_device_blocks = _choose_device_blocks(factory, cache_config, room)
        num_host_blocks = _choose_host_blocks(factory, cache_config, room, num_device_blocks)
        num_bytes = num_host_blocks * factory.block_bytes
        if loaded.device.type != "cuda":
            num_bytes += num_device_blocks * factory.block_bytes + (room.step_bytes or 0)
        release = reservations.reserve(num_bytes)
    try:
        cache = factory.cache(num_device_blocks, num_host_blocks)
    except OutOfMemory:
        release()
        raise
    weakref.finalize(cache, release)
    _log_plan(loaded, cache, room)
    return factory.runner(cache)


def _free_room(
    loaded: LoadedModel, cache_config: CacheConfig, reservations: HostReservations
) -> _Room:
    host_free = reservations.share_of(available_host_bytes(), loaded.weights_bytes)
    if loaded.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(loaded.device)
        # What the ratio leaves out is for other users of the device, and for what no step shows.
        return _Room(free, int(free - (1 - cache_config.memory_fraction) * total), host_free)
    return _Room(host_free, int(host_free * cache_config.memory_fraction), host_free)


def _must_measure(device: torch.device, cache_config: CacheConfig, room: _Room) -> bool:
    if cache_config.num_device_blocks is not None or not cache_config.max_num_batched_tokens:
        return False
    if device.type == "cuda" or cache_config.max_cpu_pool_bytes is None:
        return True
    # A large step takes a CPU seconds, which a start has not got. It is only worth them where the
    # pool is not far smaller than what there is.
    return room.budget_bytes < 2 * cache_config.max_cpu_pool_bytes


def _measure_step(
    factory: _RunnerFactory, cache_config: CacheConfig, room: _Room, meter: PeakMeter
) -> int:
    """Bytes that the largest step takes. Raises OutOfMemory."""
    loaded, block_size = factory.loaded, cache_config.block_size
    size = StepSize(
        num_rows=max(1, cache_config.max_num_rows),
        num_tokens=cache_config.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        # That takes a GPU a moment and a CPU minutes. What attends on a CPU needs no more memory
        # for it, up to a bound.
        attends_back=loaded.device.type == "cuda",
    )
    started_s = time.perf_counter()
    try:
        cache = factory.cache(num_worst_step_blocks(size, block_size), 0)
        step_bytes = measure_worst_step(
            size, cache, loaded.vocab_size, lambda: factory.measured_runner(cache), meter
        )
    except RecordingFailed:
        raise
    except ExecutorError as error:
        if not is_out_of_memory(error.__cause__ or error):
            raise
        raise OutOfMemory(
            f"the largest step does not fit: {size.num_tokens} tokens in {size.num_rows} rows,"
            f" {_free_text(loaded, room)} ({error}); lower --max-num-batched-tokens or"
            " --max-num-seqs"
        ) from error
    finally:
        # Else the model would hold on to the blocks of this step.
        unbind(loaded.attention_modules)
    _log.info("largest_step_measured seconds=%.2f", time.perf_counter() - started_s)
    return step_bytes


def _choose_device_blocks(factory: _RunnerFactory, cache_config: CacheConfig, room: _Room) -> int:
    size = factory.block_bytes
    asked = cache_config.num_device_blocks
    if asked is not None:
        if asked * size > room.free_bytes:
            raise OutOfMemory(
                f"the device pool does not fit: {asked} blocks of {size} bytes take"
                f" {format_bytes(asked * size)}, {_free_text(factory.loaded, room)}; lower"
                " --num-device-blocks"
            )
        return asked
    limit = room.pool_bytes
    if factory.loaded.device.type != "cuda" and cache_config.max_cpu_pool_bytes is not None:
        limit = min(limit, cache_config.max_cpu_pool_bytes)
    if limit < size:
        raise OutOfMemory(
            f"no room for KV blocks: one takes {size} bytes, {_free_text(factory.loaded, room)}, of"
            f" which memory fraction {cache_config.memory_fraction} allows to use"
            f" {format_bytes(max(room.budget_bytes, 0))}, and a step takes {_step_text(room)};"
            " raise --memory-fraction, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return min(limit // size, cache_config.max_auto_blocks)


def _choose_host_blocks(
    factory: _RunnerFactory, cache_config: CacheConfig, room: _Room, num_device_blocks: int
) -> int:
    free, size = room.host_bytes, factory.block_bytes
    if factory.loaded.device.type != "cuda":
        free -= num_device_blocks * size + (room.step_bytes or 0)
    asked = cache_config.num_host_blocks
    if asked is None:
        fitting = max(0, int(free * cache_config.host_memory_fraction)) // size
        return min(fitting, num_device_blocks, cache_config.max_auto_blocks)
    if asked * size > free:
        raise OutOfMemory(
            f"the host pool does not fit: {asked} blocks of {size} bytes take"
            f" {format_bytes(asked * size)}, {format_bytes(max(free, 0))} of host memory are left"
            " beside the rest; lower --num-host-blocks"
        )
    return asked


def _log_plan(loaded: LoadedModel, cache: KVCache, room: _Room) -> None:
    """Says what went where."""
    device_bytes = cache.num_device_blocks * cache.block_bytes
    host_bytes = cache.num_host_blocks * cache.block_bytes
    left = room.free_bytes - device_bytes - (room.step_bytes or 0)
    if loaded.device.type != "cuda":
        left -= host_bytes
    _log.info(
        "memory_planned device=%s weights=%r step=%r device_pool=%r host_pool=%r left=%r",
        loaded.device,
        format_bytes(loaded.weights_bytes),
        _step_text(room),
        format_bytes(device_bytes),
        format_bytes(host_bytes),
        format_bytes(left),
    )


def _free_text(loaded: LoadedModel, room: _Room) -> str:
    """What is free, and what is not because of the weights."""
    weights = format_bytes(loaded.weights_bytes)
    return f"{room.free_bytes} bytes are free on {loaded.device} beside the weights ({weights})"


def _step_text(room: _Room) -> str:
    return "not measured" if room.step_bytes is None else format_bytes(room.step_bytes)


# -- The step that takes the most memory, and how much that is -------------------------------------
#
# Shape letters: R rows of the step, T input tokens over all rows, M blocks of a block table.

# Nearly flat and cut late: all of the vocabulary has to be sorted.
_COSTLY_PARAMS = SamplingParams(
    temperature=1e3,
    top_p=0.999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    num_logprobs=20,
    num_prompt_logprobs=20,
)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step there can be.

    `num_rows`, `num_tokens`: rows, and input tokens over all of them, both at least 1.
    `max_model_len`: of a row, in tokens. `attends_back`: the first row, which has the most
    tokens, ends at `max_model_len`, so that it attends to as much as it can; all others begin at
    position 0. What one row attends to takes no memory when the next one does, or takes it by the
    widest table, so that more such rows would take time alone.
    """

    num_rows: int
    num_tokens: int
    max_model_len: int
    attends_back: bool


def make_worst_step(size: StepSize, block_size: int, vocab_size: int) -> StepInput:
    """All rows sample, with everything that takes memory, and have all tokens between them.

    As many prompt tokens are scored as ever are at a time.

    It needs the blocks 0 .. `num_worst_step_blocks` - 1. Rows write over each other, and read what
    was never written: its results mean nothing.
    """
    num_new = _num_new_tokens(size)
    ends = num_new.copy()
    if size.attends_back:
        ends[0] = size.max_model_len
    computed = ends - num_new
    # What is scored last is the token after the input.
    histories = [[0] * (end + 1) for end in ends.tolist()]
    tables = _block_tables(computed, ends, block_size)
    return StepInput(
        step_id=1,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=np.arange(len(num_new), dtype=np.int32),
        num_computed_tokens=computed.astype(np.int32),
        num_new_tokens=num_new.astype(np.int32),
        token_ids=(np.arange(num_new.sum()) % vocab_size).astype(np.int32),
        samples=np.ones(len(num_new), np.bool_),
        block_tables=tables,
        tables=BlockTables.of(tables),
        num_prompt_tokens=_num_prompt_tokens(computed, num_new),
        seeds=np.arange(len(num_new), dtype=np.int64),
        sampling_params=ParamRows.of([_COSTLY_PARAMS] * len(num_new)),
        histories=histories,
    )


def num_worst_step_blocks(size: StepSize, block_size: int) -> int:
    """How many blocks the step needs."""
    # Block 0, those of the first row, and one more where its tokens begin inside a block.
    return 2 + -(-int(_num_new_tokens(size)[0]) // block_size)


def measure_worst_step(
    size: StepSize,
    cache: KVCache,
    vocab_size: int,
    make_runner: Callable[[], Runner],
    meter: PeakMeter,
) -> int:
    """Bytes that a runner on `cache` takes beside it to be made and to run the step.

    Raises StepFailed if it cannot run it.
    """
    # On a CPU memory is taken when it is first written.
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.zero_()
    step = make_worst_step(size, cache.block_size, vocab_size)

    def run() -> None:
        output = execute_step(make_runner(), step)
        for row, message in output.row_errors.items():
            if output.row_statuses[row] == RowStatus.FAILED:
                raise StepFailed(f"the largest step cannot be run: {message}")

    return meter.peak_bytes(run)


def _num_new_tokens(size: StepSize) -> np.ndarray:
    """[R] int64, falling: one for each row, and the rest for as few as possible."""
    num_rows = min(size.num_rows, size.num_tokens)
    most = size.max_model_len - 1
    rest = size.num_tokens - num_rows - most * np.arange(num_rows)
    return np.asarray(1 + np.clip(rest, 0, most))


def _num_prompt_tokens(computed: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """[R] int32: those of the first rows are so many that MAX_SCORED_TOKENS are scored."""
    num_before = np.cumsum(num_new) - num_new
    num_scored = np.clip(MAX_SCORED_TOKENS - num_before, 0, num_new)
    return np.asarray(computed + num_scored + 1, np.int32)


def _block_tables(computed: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    """[R, M] int32: block 0 for what lies before the row's tokens, others for the tokens."""
    indexes = np.arange(-(-int(ends.max()) // block_size))
    tables = indexes - (computed // block_size)[:, None] + 1
    is_used = indexes < -(-ends // block_size)[:, None]
    return np.where(is_used, np.maximum(tables, 0), -1).astype(np.int32)
