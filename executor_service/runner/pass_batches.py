"""Passes over rows of steps, as a model is given them.

Shape letter: R rows of the step.
"""

from __future__ import annotations

from executor_service.device.kv_cache import KVCache
from executor_service.device.resident_tables import ResidentTables
from executor_service.device.sampled_tokens import SampledTokens
from executor_service.device.uploads import Uploads
from executor_service.model.input_batch import InputBatch, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.plain_draws import plain_draws
from executor_service.runner.step_shapes import MOST_PROMPTS
from executor_service.steps.step import Int64Array, StepInput


class PassBatches:
    """Makes them. The device keeps the block tables of all rows, where it has memory of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        uploads: Uploads,
        sampled: SampledTokens | None = None,
    ) -> None:
        """`uploads` go to the device of `cache`.

        `sampled` has the tokens that a step awaits; None if none ever will.
        """
        self._cache = cache
        self._vocab_size = loaded.vocab_size
        self._uploads = uploads
        self._sampled = sampled
        # On a CPU, attention itself reads keys once that rows share.
        self._max_joined = 0 if uploads.shares_memory else MOST_PROMPTS
        max_num_blocks = -(-loaded.max_model_len // cache.block_size)
        self._tables = ResidentTables(max_num_blocks, cache.device, uploads)

    def of_rows(self, step: StepInput, rows: Int64Array) -> InputBatch:
        """The pass that computes `rows` of `step`, rising indexes, and how these are drawn."""
        cache, tables = self._cache, None
        if step.tables is not None and not self._uploads.shares_memory:
            tables = self._tables.follow(step.tables)
        batch = build_input_batch(
            step,
            rows,
            cache.block_size,
            cache.device,
            self._sampled,
            self._uploads,
            tables,
            self._max_joined,
        )
        sampling_rows = batch.readout.sampling_rows
        batch.draws = lambda: plain_draws(step, sampling_rows, self._vocab_size)
        return batch
