"""An executor that returns fewer tokens than a step allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from executor_service.steps.step import StepInput
from tests.support.fakes.fake_chain import mix

# Of so many rows and steps, the first half is cut short after none, one, and so on.
_NUM_DRAWN = 12


def cut_at_random(step: StepInput) -> StepInput:
    """Half of the rows run on as far as they may, the others less; so many drafts are kept.

    Of the same row in the same step it is the same each time.
    """
    assert step.num_run_on_tokens is not None
    row_ids = step.row_ids.tolist()
    drawn = np.array([mix(row_id, step.step_id, 0) % _NUM_DRAWN for row_id in row_ids])
    limits = np.where(drawn < _NUM_DRAWN // 2, drawn, 1000).astype(np.int32)
    num_run_on = np.minimum(step.num_run_on_tokens, limits)
    drafts = None if step.drafts is None else step.drafts.shortened(limits)
    return replace(step, num_run_on_tokens=num_run_on, drafts=drafts)
