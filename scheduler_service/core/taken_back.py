"""What was taken of a result before a fault of ours broke it off: nobody was told of it."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import StepEvents, StepPlan
from scheduler_service.core.request import SequenceStatus


def take_back(placement: Placement, plan: StepPlan, events: StepEvents) -> None:
    """Makes requests what they were before the result of `plan` came, as far as they go on.

    `events`: what they would have been told. Of use to `evacuate` only: nothing else in the
    placement is put right. Beams, and what the best completions are chosen by, stay as they are.
    """
    for request, scored in events.prompt_logprobs:
        request.num_prompt_logprobs_sent -= len(scored)
    work, rows = plan.work, placement.rows
    samples = np.ones(len(work.row_ids), np.bool_) if work.samples is None else work.samples
    # A row that samples had computed all its known tokens.
    lengths = work.num_computed_tokens + work.num_new_tokens
    for index in np.flatnonzero(samples).tolist():
        row_id, length = int(work.row_ids[index]), int(lengths[index])
        sequence = placement.tenant(row_id, int(work.tenancies[index]))
        if sequence is None or sequence.is_finished or sequence.request.params.beam is not None:
            continue
        if sequence.status is SequenceStatus.RUNNING:
            rows.num_known[sequence.row_id] = min(rows.num_known[sequence.row_id], length)
        else:
            sequence.token_ids = sequence.token_ids[:length]
