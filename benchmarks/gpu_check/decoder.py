"""Our decoder beside the model of `transformers`, both with the same attention.

Shape letters: S rows of logits, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.engine import decode_times, make_runner, make_step, release_models
from benchmarks.gpu_check.models import load_random
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import ModelShape, Sizes
from executor_service.backends.attention_candidates import gpu_candidates
from executor_service.backends.compute import Compute
from executor_service.backends.gpu import choose_gpu_attention
from executor_service.decoders.decoder import DecoderModel
from executor_service.device.kv_cache import KVCache
from executor_service.model.input_batch import build_input_batch
from executor_service.model.paged_model import attending_with
from executor_service.model.transformers_attention import unbind
from splitserve_kernels.gpu.availability import why_unavailable

# That of the trial at start, in half precision.
_TOLERANCE = 0.06
_NUM_BATCHES = 2


def measure_decoder(shape: ModelShape, sizes: Sizes) -> Iterator[Measurement]:
    """Whether both say the same, and steps of decodes of few and of some rows."""
    reason = why_unavailable()
    if reason is not None:
        yield Measurement("decoder", shape.name, "not run", note=reason)
        return
    from executor_service.decoders.gpu_decoder import build_gpu_decoder

    release_models()
    sizes = replace(sizes, batches=sizes.batches[:_NUM_BATCHES])
    loaded = load_random(shape, sizes)
    chosen = choose_gpu_attention(loaded, None, None, gpu_candidates())
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
    ours = replace(theirs, make_model=lambda _loaded, cache: DecoderModel(decoder, cache))
    error = _median_error(_logits(ours, sizes), expected)
    yield Measurement(
        "decoder",
        f"{shape.name}, logits beside transformers",
        error,
        "error",
        f"at most {_TOLERANCE:g}",
        error <= _TOLERANCE,
    )
    for kind, time_s in _step_times(ours, sizes).items():
        their_s = their_times[kind]
        name = f"{shape.name}, {kind}"
        yield Measurement("decoder", f"{name}, transformers", their_s * 1e3, "ms")
        note = f"{their_s / time_s:.2f} times as fast"
        yield Measurement("decoder", f"{name}, ours", time_s * 1e3, "ms", note=note)


@torch.inference_mode()
def _logits(compute: Compute, sizes: Sizes) -> Tensor:
    """[S, V], of the ends of prompts and of decodes behind them."""
    loaded, num_rows = compute.loaded, max(sizes.batches)
    computed = sizes.model_context
    first = make_step(compute.block_size, sizes, num_rows, 0, computed)
    steps = [first, make_step(compute.block_size, sizes, num_rows, computed, 1)]
    cache = KVCache(
        loaded.layers,
        compute.block_size,
        first.block_tables.size,
        0,
        loaded.kv_dtype,
        loaded.device,
    )
    model = compute.make_model(loaded, cache)
    parts = []
    for step in steps:
        batch = build_input_batch(step, np.arange(num_rows), cache.block_size, loaded.device)
        parts.append(model.logits(batch).clone())
    return torch.cat(parts)


def _median_error(actual: Tensor, expected: Tensor) -> float:
    """Size of the difference of a row over that of the row."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _step_times(compute: Compute, sizes: Sizes) -> dict[str, float]:
    """Seconds of a step of decodes, by number of rows and with and without recording."""
    times_s = {}
    for is_recorded in (False, True) if compute.is_recordable else (False,):
        runner = make_runner(compute, sizes, is_recorded=is_recorded)
        kind = "graphs" if is_recorded else "no graphs"
        for batch in sizes.batches:
            times_s[f"{batch} rows, {kind}"] = decode_times(runner, batch, sizes).wall_s
    return times_s
