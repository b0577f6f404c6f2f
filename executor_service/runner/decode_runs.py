"""Steps whose rows get several tokens from a model that goes on with them by itself.

Shape letters: R rows of the step, m tokens that a row of it may get.
"""

from __future__ import annotations

import numpy as np

from executor_service.device.kv_cache import KVCache
from executor_service.device.uploads import Uploads
from executor_service.model.input_batch import build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel, RunningModel
from executor_service.runner.pending_sampling import INVALID_LOGITS
from executor_service.runner.plain_draws import plain_draws
from executor_service.steps.step import Int32Array, RowStatus, StepInput, StepOutput
from executor_service.steps.token_runs import TokenRuns
from splitserve_kernels.run_rows import RunRows

# So many tokens a row may get in one call: what else is asked of the executor waits for its end.
_MAX_NUM_TOKENS = 256


class DecodeRuns:
    """Has the rows of a step run on in one go, where the model does that and the rows are plain."""

    def __init__(
        self, loaded: LoadedModel, cache: KVCache, model: PagedModel, uploads: Uploads
    ) -> None:
        """`model` works on the pools of `cache`, `uploads` go to its device."""
        self._loaded = loaded
        self._cache = cache
        self._model = model if isinstance(model, RunningModel) else None
        self._uploads = uploads

    def serves(self, step: StepInput) -> bool:
        """Whether `run` takes `step`: each row has one input token, and only logits decide."""
        params = step.sampling_params
        return (
            self._model is not None
            and step.num_run_on_tokens is not None
            and step.num_rows > 0
            and step.drafts is None
            and step.awaited is None
            and step.cross is None
            and step.grammars is None
            and not any(step.adapters)
            and bool((step.num_new_tokens == 1).all() and step.samples.all())
            and not params.adjusts_logits.any()
            and not (params.num_logprobs >= 0).any()
            and not (params.num_prompt_logprobs >= 0).any()
        )

    def run(self, step: StepInput) -> StepOutput:
        """What becomes of `step`, without its block moves; call it only if `serves` says so."""
        assert self._model is not None, "the model runs on"
        assert step.num_run_on_tokens is not None, "a step whose rows run on"
        cache, rows = self._cache, np.arange(step.num_rows)
        draws = plain_draws(step, rows, self._loaded.vocab_size)
        assert draws is not None, "nothing but logits decides"
        stops = [params.stop_token_ids for params in step.sampling_params.objects]
        batch = build_input_batch(step, rows, cache.block_size, cache.device, uploads=self._uploads)
        run_rows = RunRows.of(draws, self._num_tokens(step.num_run_on_tokens, step), stops)
        return _output(self._model.decode_run(batch, run_rows))

    def _num_tokens(self, num_run_on_tokens: Int32Array, step: StepInput) -> Int32Array:
        """How many each row may get, [R]; the model knows no position behind max_model_len."""
        num_positions = np.maximum(self._loaded.max_model_len - step.num_computed_tokens, 1)
        return np.minimum(num_run_on_tokens + 1, np.minimum(num_positions, _MAX_NUM_TOKENS))


def _output(tokens: Int32Array) -> StepOutput:
    """`tokens`: [R, m], -1 behind the last one of each row."""
    is_token = tokens >= 0
    counts = is_token.sum(axis=1)
    has_tokens = counts > 0
    last = tokens[np.arange(len(tokens)), np.maximum(counts - 1, 0)]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    statuses = np.where(has_tokens, RowStatus.OK, RowStatus.INVALID_LOGITS)
    return StepOutput(
        row_statuses=statuses.astype(np.uint8),
        sampled_token_ids=last,
        row_errors=dict.fromkeys(np.flatnonzero(~has_tokens).tolist(), INVALID_LOGITS),
        runs=TokenRuns(offsets, tokens[is_token]),
    )
