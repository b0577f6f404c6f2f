"""Sizes of the KV pools, so that they fit beside weights and the largest step; runner creation."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor_service.device import (
    CopyBlocks,
    HostReservations,
    KVCache,
    LayerShape,
    PeakMeter,
    available_host_bytes,
    block_bytes,
    copy_in_torch,
    format_bytes,
    is_out_of_memory,
    peak_meter_of,
    release_cached_memory,
)
from executor_service.errors import ExecutorError, OutOfMemory, RecordingFailed, StepFailed
from executor_service.model import LoadedModel, MakeModel, torch_model, unbind
from executor_service.runner.forward_pass import MAX_SCORED_TOKENS
from executor_service.runner.model_runner import ModelRunner
from executor_service.sampling import Adjust, Draw, adjust_in_torch, draw_in_torch
from executor_service.steps import (
    NO_MOVES,
    BlockTables,
    ModelVectors,
    ParamRows,
    RowStatus,
    Runner,
    SamplingParams,
    StepInput,
    execute_step,
)
from splitserve_kernels.paged_batch import SLOT_SCALES, UNIT_SCALES, KVScales

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Configuration of the KV pools. Numbers of blocks that are None are chosen to fit.

    `memory_fraction`: on a GPU, the share of its memory for weights, the largest step and the
    device pool; on a CPU, the share of the free memory for that step and the pool, which then takes
    at most `max_cpu_pool_bytes` (None: no limit).

    `num_host_blocks`: 0 turns swapping off. None takes as many blocks as on the device, in at most
    `host_memory_fraction` of the host memory that the device pool leaves free. `max_auto_blocks`:
    upper limit of automatically chosen numbers, because the scheduler keeps books on every block.

    `max_num_rows`, `max_num_batched_tokens`: limits of one pass; 0 reserves no memory for a step.
    `copy_blocks`: copies blocks within the device pool. `more_layers`: layers of a draft model,
    stored in the same blocks behind the layers of the served model.
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
    """Creates caches and runners for `loaded`.

    `make_measured`: creates a model that takes as much memory as that of `make_model`.
    """

    loaded: LoadedModel
    cache_config: CacheConfig
    make_model: MakeModel
    make_measured: MakeModel
    draw: Draw
    adjust: Adjust

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Layers that one block stores, those of a draft model included."""
        return (*self.loaded.layers, *self.cache_config.more_layers)

    @property
    def scales(self) -> tuple[KVScales, ...]:
        """Scales of `layers`; those of a draft model are in slots where the model's are, else 1."""
        if not self.loaded.kv_scales:
            return ()
        of_draft = SLOT_SCALES if self.loaded.has_slot_scales else UNIT_SCALES
        return (*self.loaded.kv_scales, *(of_draft for _ in self.cache_config.more_layers))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return block_bytes(
            self.layers, self.cache_config.block_size, self.loaded.kv_dtype, self.scales
        )

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
            scales=self.scales,
        )

    def runner(self, cache: KVCache) -> ModelRunner:
        """Returns the serving runner on the pools of `cache`."""
        return self._runner(cache, self.make_model)

    def measured_runner(self, cache: KVCache) -> ModelRunner:
        """Returns a runner that takes as much memory as the serving one, for measuring only."""
        return self._runner(cache, self.make_measured)

    def _runner(self, cache: KVCache, make_model: MakeModel) -> ModelRunner:
        model = make_model(self.loaded, cache)
        return ModelRunner(self.loaded, cache, model, self.draw, adjust=self.adjust)


@dataclass(frozen=True, slots=True)
class _Room:
    """Free memory for the pools and a step.

    `free_bytes`: free on the device. `budget_bytes`: allowed for the device pool and the largest
    step. `host_bytes`: free on this machine before the pools. `step_bytes`: memory of the largest
    step; None if it was not measured.
    """

    free_bytes: int
    budget_bytes: int
    host_bytes: int
    step_bytes: int | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes allowed for the device pool."""
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
    """Allocates the pools and returns a runner for `loaded`. `adjust` and `draw` choose the tokens.

    If the number of device blocks is not configured, it may first run the largest step, on a model
    of `make_measured` (None: `make_model`), and measure its memory by `meter`. `reservations`:
    memory reservations of executors on this machine, to which the pools belong as long as they
    live; None for no sharing. Raises OutOfMemory, with the numbers, if the pools, that step or a
    single block do not fit.
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
        # Other executors may have reserved memory meanwhile.
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
        # The rest of the device is for its other users, and for memory that no step shows.
        return _Room(free, int(free - (1 - cache_config.memory_fraction) * total), host_free)
    return _Room(host_free, int(host_free * cache_config.memory_fraction), host_free)


def _must_measure(device: torch.device, cache_config: CacheConfig, room: _Room) -> bool:
    if cache_config.num_device_blocks is not None or not cache_config.max_num_batched_tokens:
        return False
    if device.type == "cuda" or cache_config.max_cpu_pool_bytes is None:
        return True
    # A large step takes seconds on a CPU, too long for a start. It is worth them only where the
    # pool takes a large part of the free memory.
    return room.budget_bytes < 2 * cache_config.max_cpu_pool_bytes


def _measure_step(
    factory: _RunnerFactory, cache_config: CacheConfig, room: _Room, meter: PeakMeter
) -> int:
    """Returns the bytes that the largest step takes. Raises OutOfMemory."""
    loaded, block_size = factory.loaded, cache_config.block_size
    size = StepSize(
        num_rows=max(1, cache_config.max_num_rows),
        num_tokens=cache_config.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        # Attending to the longest context takes a GPU a moment and a CPU minutes. On a CPU,
        # attention needs no more memory for it, up to a bound.
        attends_back=loaded.device.type == "cuda",
    )
    started_s = time.perf_counter()
    try:
        cache = factory.cache(num_worst_step_blocks(size, block_size), 0)
        step_bytes = measure_worst_step(
            size,
            cache,
            loaded.vocab_size,
            lambda: factory.measured_runner(cache),
            meter,
            loaded.vectors,
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
        # Otherwise the model would keep the blocks of this step alive.
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
            f"no room for KV blocks: one takes {size} bytes, {_free_text(factory.loaded, room)};"
            f" memory fraction {cache_config.memory_fraction} allows"
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
            f" {format_bytes(asked * size)}, only {format_bytes(max(free, 0))} of host memory"
            " are left; lower --num-host-blocks"
        )
    return asked


def _log_plan(loaded: LoadedModel, cache: KVCache, room: _Room) -> None:
    """Logs how the memory is divided."""
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
    """Returns an error text about the free memory and the weights."""
    weights = format_bytes(loaded.weights_bytes)
    return f"{room.free_bytes} bytes are free on {loaded.device} besides the weights ({weights})"


def _step_text(room: _Room) -> str:
    return "not measured" if room.step_bytes is None else format_bytes(room.step_bytes)


# -- Measurement of the step that takes the most memory --------------------------------------------
#
# Shape letters: R rows of the step, T input tokens over all rows, M blocks of a block table.

# A nearly flat distribution with a late cut: the whole vocabulary has to be sorted.
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
    """Size of the largest possible step.

    `num_rows`, `num_tokens`: rows, and input tokens of all rows, both at least 1. `max_model_len`:
    tokens of a row. `attends_back`: the first row, which has the most tokens, ends at
    `max_model_len`, so that it attends to the longest context; all other rows begin at position 0.
    One such row is enough: more would take time but no more memory, as context memory is reused
    from row to row or depends on the widest table.
    """

    num_rows: int
    num_tokens: int
    max_model_len: int
    attends_back: bool


def make_worst_step(size: StepSize, block_size: int, vocab_size: int) -> StepInput:
    """Builds the step of this size that takes the most memory. Its results mean nothing.

    All rows sample, with every memory-consuming parameter, and share all tokens. As many prompt
    tokens are scored as ever are at a time. The step needs the blocks 0 .. `num_worst_step_blocks`
    - 1. Rows overwrite each other's blocks and read blocks that were never written.
    """
    num_new = _num_new_tokens(size)
    ends = num_new.copy()
    if size.attends_back:
        ends[0] = size.max_model_len
    computed = ends - num_new
    # The last scored token comes after the input.
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
    """Returns the number of blocks that the step of `make_worst_step` needs."""
    # Block 0, the blocks of the first row, and one more if its tokens begin inside a block.
    return 2 + -(-int(_num_new_tokens(size)[0]) // block_size)


def measure_worst_step(
    size: StepSize,
    cache: KVCache,
    vocab_size: int,
    make_runner: Callable[[], Runner],
    meter: PeakMeter,
    vectors: ModelVectors | None = None,
) -> int:
    """Returns the bytes, beside `cache`, that creating a runner on it and running the step take.

    `vectors`: what rows return in place of tokens; None if they return tokens. Raises StepFailed if
    the runner cannot run the step.
    """
    # A CPU takes memory when it is first written.
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.zero_()
    step = make_worst_step(size, cache.block_size, vocab_size)
    if vectors is not None:
        step = replace(step, pooling=[vectors.plain_params] * step.num_rows)

    def run() -> None:
        output = execute_step(make_runner(), step)
        for row, message in output.row_errors.items():
            if output.row_statuses[row] == RowStatus.FAILED:
                raise StepFailed(f"the largest step failed: {message}")

    return meter.peak_bytes(run)


def _num_new_tokens(size: StepSize) -> np.ndarray:
    """Returns the numbers of new tokens, [R] int64, falling.

    Each row has one, and as few rows as possible have the rest.
    """
    num_rows = min(size.num_rows, size.num_tokens)
    most = size.max_model_len - 1
    rest = size.num_tokens - num_rows - most * np.arange(num_rows)
    return np.asarray(1 + np.clip(rest, 0, most))


def _num_prompt_tokens(computed: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Returns prompt lengths, [R] int32, such that MAX_SCORED_TOKENS tokens are scored."""
    num_before = np.cumsum(num_new) - num_new
    num_scored = np.clip(MAX_SCORED_TOKENS - num_before, 0, num_new)
    return np.asarray(computed + num_scored + 1, np.int32)


def _block_tables(computed: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the block tables, [R, M] int32.

    Block 0 stands for everything before the row's new tokens; these have other blocks.
    """
    indexes = np.arange(-(-int(ends.max()) // block_size))
    tables = indexes - (computed // block_size)[:, None] + 1
    is_used = indexes < -(-ends // block_size)[:, None]
    return np.where(is_used, np.maximum(tables, 0), -1).astype(np.int32)
