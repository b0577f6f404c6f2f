"""Steps whose tokens can be drawn where their logits are computed."""

from __future__ import annotations

from executor_service.sampling.sampler import SamplingRows, draw_rows
from executor_service.steps.step import StepInput
from splitserve_kernels.draw_rows import DrawRows


def plain_draws(step: StepInput, vocab_size: int) -> DrawRows | None:
    """How the rows of `step` are drawn, if all sample and nothing but their logits decides.

    None if a row has penalties, a bias, a grammar or whatever else changes logits before they are
    drawn from: what that is may be known only when they are there.
    """
    params = step.sampling_params
    if not step.samples.all() or params.adjusts_logits.any():
        return None
    positions = step.num_computed_tokens + step.num_new_tokens
    rows = SamplingRows(params, step.seeds, positions, step.num_prompt_tokens, step.histories)
    return draw_rows(rows, vocab_size)
