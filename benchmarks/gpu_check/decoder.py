"""Our decoder beside the model of `transformers`: the same logits, and how much sooner.

Shape letters: S rows of logits, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.backends import all_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.models import load_random
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import pipelined_s, release_models, runner_of, steps_of
from benchmarks.gpu_check.sizes import Rows, Sizes
from benchmarks.gpu_check.steps import make_step, num_blocks_of
from benchmarks.gpu_check.work import ModelWork
from executor_service.backends import Compute, choose_gpu_attention
from executor_service.device import KVCache
from executor_service.model import attending_with, build_input_batch, unbind
from splitserve_kernels.gpu.launch import why_unavailable

# That of the trial at start, in half precision.
_TOLERANCE = 0.06
_BATCHES = (1, 32)


def cases(sizes: Sizes) -> Iterator[Case]:
    """One after the other: they share a model, whose weights the decoder takes."""
    if why_unavailable() is None:
        yield Case(sizes.small_model.name, 90, partial(_measure, sizes))


def _measure(sizes: Sizes) -> Iterator[Measurement]:
    from executor_service.decoders.gpu_decoder import GpuDecoderModel, build_gpu_decoder

    release_models()
    name = sizes.small_model.name
    loaded = load_random(sizes.small_model, sizes)
    chosen = choose_gpu_attention(loaded, None, None, all_backends())
    theirs = Compute(
        loaded,
        attending_with(chosen.backend),
        "transformers",
        chosen.block_size,
        is_recordable=loaded.device.type == "cuda",
    )
    expected, their_times = _logits(theirs, sizes), _step_times(theirs, sizes)
    unbind(loaded.attention_modules)
    decoder = build_gpu_decoder(loaded, chosen.backend, chosen.block_size)
    ours = replace(theirs, make_model=lambda _loaded, cache: GpuDecoderModel(decoder, cache))
    error = _median_error(_logits(ours, sizes), expected)
    aim = f"at most {_TOLERANCE:g}"
    yield Measurement(f"{name}, logits beside theirs", error, "error", aim, error <= _TOLERANCE)
    for (batch, kind), time_s in _step_times(ours, sizes).items():
        their_s = their_times[batch, kind]
        rows: Rows = ((sizes.model_context, 1),) * batch
        floor = ModelWork.of(sizes.small_model, sizes.dtype.itemsize).floor(rows, rates_of(sizes))
        line = f"{name}, {batch} rows, {kind}"
        yield Measurement(f"{line}, transformers", their_s * 1e3, "ms a step")
        note = f"{their_s / time_s:.2f} times as fast; {floor.note(time_s)}"
        yield Measurement(f"{line}, ours", time_s * 1e3, "ms a step", note=note)


@torch.inference_mode()
def _logits(compute: Compute, sizes: Sizes) -> Tensor:
    """[S, V], of the ends of prompts and of decodes behind them."""
    loaded, num_rows = compute.loaded, _batches(sizes)[-1]
    prompts: Rows = ((0, sizes.model_context),) * num_rows
    decodes: Rows = ((sizes.model_context, 1),) * num_rows
    num_blocks = num_blocks_of(decodes, compute.block_size)
    cache = KVCache(
        loaded.layers, compute.block_size, num_blocks, 0, loaded.kv_dtype, loaded.device
    )
    model = compute.make_model(loaded, cache)
    # Tables as wide as those of the decodes: both are of the same rows.
    tables = make_step(decodes, cache.block_size, num_blocks).block_tables
    parts = []
    for rows in (prompts, decodes):
        step = replace(make_step(rows, cache.block_size, num_blocks), block_tables=tables)
        batch = build_input_batch(step, np.arange(num_rows), cache.block_size, loaded.device)
        parts.append(model.logits(batch).to(torch.float32, copy=True))
    return torch.cat(parts)


def _median_error(actual: Tensor, expected: Tensor) -> float:
    """Size of the difference of a row over that of the row."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _step_times(compute: Compute, sizes: Sizes) -> dict[tuple[int, str], float]:
    """Seconds of a step of decodes, by number of rows and with and without recording."""
    times_s: dict[tuple[int, str], float] = {}
    if sizes.is_smoke:  # the parts of whole models time steps
        return times_s
    batches = _batches(sizes)
    widest: Rows = ((sizes.model_context + 100, 1),) * batches[-1]
    num_blocks = num_blocks_of(widest, compute.block_size)
    for is_recorded in (False, True) if compute.is_recordable else (False,):
        kind = "recorded" if is_recorded else "not recorded"
        with runner_of(compute, num_blocks, batches[-1], sizes, is_recorded=is_recorded) as runner:
            for batch in batches:
                rows: Rows = ((sizes.model_context, 1),) * batch
                times_s[batch, kind] = pipelined_s(runner, steps_of(runner, rows), sizes.num_steps)
    return times_s


def _batches(sizes: Sizes) -> tuple[int, ...]:
    return sizes.batches[-1:] if sizes.is_smoke else _BATCHES
