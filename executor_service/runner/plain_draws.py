"""Steps whose tokens can be drawn where their logits are computed.

Shape letter: S rows that sample.
"""

from __future__ import annotations

from executor_service.sampling.sampler import SamplingRows, draw_rows
from executor_service.steps.step import Int64Array, StepInput
from splitserve_kernels.draw_rows import DrawRows


def plain_draws(step: StepInput, sampling_rows: Int64Array, vocab_size: int) -> DrawRows | None:
    """How `sampling_rows` [S] of `step`, indexes, are drawn, if nothing but logits decides.

    None if a row has penalties, a bias, a grammar or whatever else changes logits before they are
    drawn from: what that is may be known only when they are there. None, too, if S is 0.
    """
    params, seeds, positions = (
        step.sampling_params,
        step.seeds,
        step.num_computed_tokens + step.num_new_tokens,
    )
    if len(sampling_rows) < step.num_rows:
        params = params.take(sampling_rows)
        seeds, positions = seeds[sampling_rows], positions[sampling_rows]
    if not len(sampling_rows) or params.adjusts_logits.any():
        return None
    # How long prompts and histories are makes no difference then.
    histories = [None] * len(positions)
    return draw_rows(SamplingRows(params, seeds, positions, positions, histories), vocab_size)
