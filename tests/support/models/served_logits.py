"""Logits of a prompt as an executor computes them, without a runner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.model.input_batch import build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel
from executor_service.steps.sampling_params import SamplingParams
from tests.support.steps.step_driver import Row, make_step


@torch.inference_mode()
def served_logits(
    loaded: LoadedModel,
    make_model: MakeModel,
    tokens: Sequence[int],
    block_size: int,
    ends: Sequence[int] = (),
) -> Tensor:
    """Logits [len(tokens), V] on pools of their own, in chunks that end at `ends`, on the CPU."""
    size = len(tokens)
    table = list(reversed(range(-(-size // block_size))))
    pools = (loaded.layers, block_size, len(table), 0, loaded.kv_dtype, loaded.device)
    model = make_model(loaded, KVCache(*pools, scales=loaded.kv_scales))
    params, parts = SamplingParams(num_prompt_logprobs=0), []
    for start, end in itertools.pairwise((0, *ends, size)):
        row = Row(tokens[start:end], start, table, size + 1, False, params)
        batch = build_input_batch(make_step([row]), [0], block_size, loaded.device)
        parts.append(model.logits(batch).clone())
    return torch.cat(parts).cpu()
