"""Requests leave: they become what another core can take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from scheduler_service.core.beam_search import BeamSearch
from scheduler_service.core.params_sets import OF_NO_CORE
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import StepEvents, StepPlan
from scheduler_service.core.request import (
    NO_ROW,
    Request,
    RequestStatus,
    Sequence,
    SequenceStatus,
)


def evacuate(placement: Placement, in_flight: Collection[str]) -> list[Request]:
    """Copies of all requests; `in_flight`: those that steps without a result were to compute."""
    moved = []
    for request in placement.requests.values():
        moved.append(detach(request, placement))
        moved[-1].was_in_flight = request.request_id in in_flight
    return moved


def take_back(placement: Placement, plan: StepPlan, events: StepEvents) -> None:
    """Makes requests what they were before the result of `plan` came, as far as they go on.

    `events`: what they would have been told. Of use to `evacuate` only: nothing else in the
    placement is put right. Beams stay as they are, and so do the scores of completions that had
    tokens before.
    """
    for request, scored in events.prompt_logprobs:
        request.num_prompt_logprobs_sent -= len(scored)
    work, rows = plan.work, placement.rows
    samples = np.ones(len(work.row_ids), np.bool_) if work.samples is None else work.samples
    # A row that samples had computed all its known tokens.
    lengths = work.num_computed_tokens + work.num_new_tokens
    for index in np.flatnonzero(samples).tolist():
        row_id, length = int(work.row_ids[index]), int(lengths[index])
        sequence = placement.sequence_of(row_id, int(work.stay_ids[index]))
        if sequence is None or sequence.is_finished or sequence.request.params.beam is not None:
            continue
        if sequence.status is SequenceStatus.RUNNING:
            rows.num_known[sequence.row_id] = min(rows.num_known[sequence.row_id], length)
        else:
            sequence.token_ids = sequence.token_ids[:length]
        if length == sequence.num_prompt_tokens:
            # These are the tokens by which the best completions are chosen.
            sequence.cumulative_logprob, sequence.scored = 0.0, []


def detach(request: Request, placement: Placement) -> Request:
    """A copy of a request that another placement may take; `placement` never gets at it."""
    moved = replace(
        request,
        status=RequestStatus.ABSENT,
        params_set=OF_NO_CORE,
        prepared_for=None,
        is_encoded=False,
        cross_blocks=[],
        host_cross_blocks=[],
        completions=list(request.completions),
        search=request.search and BeamSearch.from_state(request.search.state),
    )
    moved.sequences = [
        _detach_sequence(sequence, moved, placement) for sequence in request.sequences
    ]
    return moved


def _detach_sequence(sequence: Sequence, moved: Request, placement: Placement) -> Sequence:
    """A copy for `moved`. Neither blocks nor steps of `placement` mean a thing elsewhere."""
    status = SequenceStatus.FINISHED if sequence.is_finished else SequenceStatus.WAITING
    return replace(
        sequence,
        request=moved,
        token_ids=placement.known_tokens(sequence).copy(),
        status=status,
        row_id=NO_ROW,
        num_promised=0,
        settles_at_step=0,
        num_computed=0,
        host_table=[],
        block_hashes=[],
        chains={},
        candidates=None,
        scored=list(sequence.scored),
    )
