"""Beam search through the core: beams as sequences that advance in lockstep, fork and end."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.plan import StepEvents, StepOutcome
from scheduler_service.scheduler.values.request import FinishReason, Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping
from tests.support.core.checked_engine import CheckedEngine, expected_hypotheses
from tests.support.core.driver import CoreDriver

PROMPT = [1, 2, 3, 4, 5, 6]


def check_completions(request: Request) -> None:
    """A search over the pure function that the runner computes gives the same."""
    found = [(c.token_ids, c.score, c.cumulative_logprob) for c in request.completions]
    hypotheses = expected_hypotheses(request)
    assert found == [(list(h.token_ids), h.score, h.cumulative_logprob) for h in hypotheses]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_beams_find_what_a_search_finds_when_nothing_disturbs_them(width: int, depth: int) -> None:
    engine = CheckedEngine(depth=depth)
    request = engine.add(PROMPT, max_tokens=9, beam=BeamParams(width), n=width)
    engine.run()
    check_completions(request)
    assert len(request.completions) == width


def test_beam_search_is_charged_a_token_for_each_beam_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CheckedEngine(queue_policy="fair", depth=1)
    charged = Counter[str]()
    apply = engine.core.apply

    def counted(outcome: StepOutcome) -> StepEvents:
        events = apply(outcome)
        charged.update(events.num_sampled)
        return events

    monkeypatch.setattr(engine.core, "apply", counted)
    scheduling = SchedulingParams(tenant="a")
    engine.add(PROMPT, max_tokens=9, beam=BeamParams(4), n=4, scheduling=scheduling)
    engine.run()

    # The prompt has one row, and each of the eight steps after it four beams.
    assert charged == {"a": 1 + 8 * 4}


@pytest.mark.parametrize(
    "beam", [BeamParams(3, 0.0), BeamParams(3, -1.0), BeamParams(3, 2.0, EarlyStopping.NEVER)]
)
def test_beams_find_what_a_search_finds_when_lengths_are_rated(beam: BeamParams) -> None:
    engine = CheckedEngine()
    request = engine.add(PROMPT, max_tokens=7, beam=beam, n=2)
    engine.run()
    check_completions(request)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_beams_find_the_same_when_they_are_preempted(mode: PreemptionMode, depth: int) -> None:
    engine = CheckedEngine(
        num_device_blocks=22, num_host_blocks=14, depth=depth, preemption_mode=mode
    )
    requests = [
        engine.add([start, *PROMPT], max_tokens=14, beam=BeamParams(3), n=3) for start in (7, 8, 9)
    ]
    for _ in range(6):
        engine.step(3)
        running = engine.core.placement.rows.running
        if running:
            engine.preempt(running[-1].request)
    engine.run()
    assert engine.core.num_preemptions >= 4
    for request in requests:
        check_completions(request)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_beams_find_the_same_when_they_are_preempted_while_a_step_is_in_flight(
    mode: PreemptionMode,
) -> None:
    engine = CheckedEngine(num_host_blocks=40, preemption_mode=mode)
    request = engine.add(PROMPT, max_tokens=9, beam=BeamParams(3), n=3)
    for _ in range(5):
        engine.step()
        engine.engine.fill()
        if request.status.value == "running":
            engine.preempt(request)
    engine.run()
    assert request.num_preemptions >= 2
    check_completions(request)


def test_beams_share_full_blocks_only_when_their_tokens_agree() -> None:
    engine = CheckedEngine(prefix_caching=False)
    engine.add([*PROMPT, 7, 8, 9], max_tokens=9, beam=BeamParams(4), n=4)
    engine.step(4)
    engine.engine.fill()
    rows = engine.core.placement.rows
    beams = [
        (rows.block_table(s.row_id).tolist(), rows.known_tokens(s.row_id)[:12].tolist())
        for s in rows.running
    ]
    pairs = list(itertools.combinations(beams, 2))
    assert len(pairs) == 6
    for (table, tokens), (other_table, other_tokens) in pairs:
        assert table[:2] == other_table[:2]
        assert (table[2] == other_table[2]) is (tokens == other_tokens)
        assert table[3] != other_table[3]
    assert any(tokens == other_tokens for (_, tokens), (_, other_tokens) in pairs)


def test_beams_stream_no_tokens_when_the_best_are_chosen_at_the_end() -> None:
    engine = CheckedEngine()
    engine.add(PROMPT, max_tokens=4, beam=BeamParams(3), n=2)
    for _ in range(20):
        engine.engine.fill()
        if engine.engine.in_flight:
            events = engine.answer()
            assert (events.tokens, events.client_keys.tolist()) == ([], [])


def test_rows_are_kept_for_beams_when_others_wait() -> None:
    driver = CoreDriver(max_num_seqs=4)
    driver.add(3, beam=BeamParams(4))
    driver.add(3, "next")
    assert [name for name, _, _ in driver.next_rows()] == ["r1"]
    assert driver.core.num_waiting == 1


def test_beams_end_by_length_when_max_tokens_is_reached() -> None:
    engine = CheckedEngine()
    request = engine.add(PROMPT, max_tokens=4, beam=BeamParams(2))
    engine.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert [completion.finish_reason for completion in request.completions] == [FinishReason.LENGTH]


def test_beams_end_by_model_length_when_the_model_is_shorter_than_max_tokens() -> None:
    engine = CheckedEngine(max_model_len=10)
    request = engine.add(PROMPT, max_tokens=40, beam=BeamParams(2))
    engine.run()
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.completions[0].token_ids) == 4


@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_frees_everything_when_beams_run(in_flight: bool) -> None:
    engine = CheckedEngine(num_host_blocks=8)
    engine.add(PROMPT, "doomed", max_tokens=9, beam=BeamParams(3))
    engine.step(3)
    if in_flight:
        engine.engine.fill()
    engine.core.abort("doomed")
    engine.drain()
    engine.check_blocks()


def test_request_fails_alone_when_a_beam_gets_no_logprobs() -> None:
    driver = CoreDriver()
    request, other = driver.add(3, beam=BeamParams(2)), driver.add(3)
    driver.plan()
    driver.answer()
    assert request.error == ("ROW_FAILED", "the executor broke its contract: it has no logprobs")
    assert other.error is None


@pytest.mark.parametrize("options", [{"max_model_len": 12}, {"num_device_blocks": 8}])
def test_beams_come_to_their_end_when_the_next_executor_holds_less(
    options: dict[str, Any],
) -> None:
    large, small = CheckedEngine(), CheckedEngine(**options)
    large.add(PROMPT, max_tokens=20, beam=BeamParams(2))
    large.step(3)
    (moved,) = large.core.evacuate()
    small.adopt(moved, large)
    small.drain(500)
    assert moved.is_finished
    small.check_blocks()
