"""Rows with a grammar: refusals, rows that are asked again until it is compiled, failures."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.outcomes import MAX_UNSAMPLED_NS
from scheduler_service.scheduler.values import (
    BeamParams,
    Feature,
    Grammar,
    PreemptionMode,
    RowStatus,
    StepPlan,
)
from splitserve_contract import DomainError
from tests.support.core.driver import CoreDriver

OK, NOT_SAMPLED, GRAMMAR_INVALID = RowStatus.OK, RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID
SCHEMA = Grammar("json_schema", ("{}",))
ALL = frozenset(Feature)


def grammar_driver(**config: object) -> CoreDriver:
    return CoreDriver(**({"features": ALL, "prefix_caching": False} | config))  # type: ignore[arg-type]


def planned(grammar_driver: CoreDriver) -> StepPlan:
    plan = grammar_driver.plan()
    assert plan is not None
    return plan


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"beam": BeamParams(2)}, "grammar is"),
        ({"grammar": Grammar("regex", ("",))}, "grammar.regex has an empty text"),
        ({"grammar": Grammar("choices", ("a", ""))}, "grammar.choices has an empty text"),
        ({"grammar": Grammar("choices", ())}, "grammar.choices has 0 texts"),
        ({"grammar": Grammar("choices", ("a",) * 1025)}, "has 1025 texts"),
        ({"grammar": Grammar("lark", ("é" * 32769,))}, "grammar.lark has 65538 bytes"),
        ({"grammar": Grammar("choices", ("x" * 40000,) * 2)}, "has 80000 bytes"),
    ],
)
def test_request_is_refused_when_its_grammar_cannot_be_kept(
    params: dict[str, object], named: str
) -> None:
    with pytest.raises(DomainError) as caught:
        grammar_driver().add(3, **({"grammar": SCHEMA} | params))  # type: ignore[arg-type]
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"
    assert named in caught.value.message


def test_grammar_is_refused_when_the_model_has_no_end() -> None:
    with pytest.raises(DomainError, match="end-of-sequence") as caught:
        grammar_driver(eos_token_ids=frozenset()).add(3, grammar=SCHEMA)
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"


def test_grammar_is_refused_by_feature_when_unsupported() -> None:
    core = grammar_driver(features=ALL - {Feature.GRAMMAR}).core
    request = CoreDriver().make_request(3, grammar=SCHEMA)
    assert not core.fits(request)
    with pytest.raises(DomainError, match="grammar") as caught:
        core.add(request)
    assert caught.value.reason == "FEATURE_UNSUPPORTED"


# -- asked again -------------------------------------------------------------------------------


def test_row_waits_for_its_first_token_before_another_step() -> None:
    d = grammar_driver()
    d.add(6, grammar=SCHEMA)
    d.add(6)
    assert d.next_rows() == [("r1", 0, 6), ("r2", 0, 6)]
    assert d.next_rows() == [("r2", 6, 1)]


def test_unsampled_row_computes_only_its_last_token_again() -> None:
    d = grammar_driver()
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    num_free = d.core.num_free_blocks
    for _ in range(3):
        events = d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
        assert len(events.token_ids) == 0
        plan = planned(d)
        assert d.rows_of(plan) == [("r1", 5, 1)]
        assert plan.work.token_ids.tolist() == [6]
        assert plan.work.sampled_steps_back.tolist() == [0]
        assert not plan.new_rows
    assert d.core.num_free_blocks == num_free
    assert d.answer(token_ids=[8]).token_ids.tolist() == [8]
    assert request.num_fruitless_losses == request.num_preemptions == 0


def test_row_is_pipelined_when_it_has_its_first_token() -> None:
    d = grammar_driver()
    d.add(6, grammar=SCHEMA)
    d.step()
    plan = planned(d)
    # The first is told to the executor, the second is the one that it samples for the first.
    assert (d.rows_of(plan), plan.work.token_ids.tolist()) == ([("r1", 6, 1)], [7])
    plan = planned(d)
    assert (d.rows_of(plan), plan.work.sampled_steps_back.tolist()) == ([("r1", 7, 1)], [1])


@pytest.mark.parametrize("status", [OK, NOT_SAMPLED])
def test_swapped_row_goes_on_where_its_answered_step_was(status: RowStatus) -> None:
    d = grammar_driver(num_host_blocks=64, preemption_mode=PreemptionMode.SWAP)
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    d.preempt(request)
    d.answer(row_statuses=[status], token_ids=[8 if status is OK else -1])
    d.step()  # it is moved
    assert d.next_rows() == [("r1", 6, 1) if status is OK else ("r1", 5, 1)]


# -- who says so -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [NOT_SAMPLED, GRAMMAR_INVALID])
def test_row_fails_alone_when_it_has_no_grammar(status: RowStatus) -> None:
    d = grammar_driver()
    request, other = d.add(6), d.add(5)
    d.plan()
    events = d.answer(row_statuses=[status, OK], token_ids=[-1, 5])
    assert events.finished == [request]
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"
    assert "no grammar" in request.error[1]
    assert events.client_keys.tolist() == [other.client_key]


def test_row_fails_when_unsampled_after_its_first_token() -> None:
    d = grammar_driver()
    request = d.add(6, grammar=SCHEMA)
    d.step()
    d.plan()
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


@pytest.mark.parametrize("status", [NOT_SAMPLED, GRAMMAR_INVALID])
def test_row_fails_when_its_prompt_was_not_to_be_sampled(status: RowStatus) -> None:
    d = grammar_driver(max_num_batched_tokens=4, max_num_seqs=4)
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    d.answer(row_statuses=[status], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


def test_nobody_else_loses_anything_when_a_grammar_is_invalid() -> None:
    d = grammar_driver(prefix_caching=True)
    prompt = list(range(1, 10))
    request, other = d.add(prompt, grammar=SCHEMA), d.add([*prompt, 20, 21])
    rows = d.next_rows()
    assert rows[0] == (request.request_id, 0, 9)
    assert rows[1] == (other.request_id, 8, 3)  # it leans on what the first one writes
    events = d.answer(row_statuses=[GRAMMAR_INVALID, OK], token_ids=[-1, 5])
    assert request.error == ("GRAMMAR_INVALID", "the executor could not compute the request")
    assert events.client_keys.tolist() == [other.client_key]
    assert d.next_rows() == [(other.request_id, 11, 1)]
    assert d.core.num_cached_blocks == 2


# -- what rows read ----------------------------------------------------------------------------


def test_invalid_grammar_is_reported_before_missing_scores() -> None:
    d = grammar_driver()
    request = d.add([1, 2, 3, 4], grammar=SCHEMA, num_prompt_logprobs=1)
    d.plan()
    d.answer(row_statuses=[GRAMMAR_INVALID], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "GRAMMAR_INVALID"


MS = 10**6
START_NS = 7 * MS


def ticking_driver(**options: object) -> CoreDriver:
    values = {"features": frozenset(Feature), "prefix_caching": False} | options
    d = CoreDriver(**values)  # type: ignore[arg-type]
    d.core.tick(START_NS)
    return d


def ask_in_vain(d: CoreDriver) -> None:
    """The next step is of one row alone, which gets no token."""
    assert d.plan() is not None
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])


def test_idle_row_is_asked_again_a_moment_later() -> None:
    d = ticking_driver()
    d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    assert d.core.schedule() is None
    assert d.core.ask_again_at_ns == START_NS + 2 * MS
    d.core.tick(START_NS + 2 * MS)
    assert d.next_rows() == [("r1", 5, 1)]
    assert d.core.ask_again_at_ns is None


def test_pauses_grow_with_the_time_that_a_row_has_waited() -> None:
    d = ticking_driver()
    d.add(6, grammar=SCHEMA)
    pauses_ms, before = [], START_NS
    for _ in range(12):
        ask_in_vain(d)
        assert d.core.schedule() is None
        assert d.core.ask_again_at_ns is not None
        pauses_ms.append((d.core.ask_again_at_ns - before) / MS)
        before = d.core.ask_again_at_ns
    assert pauses_ms == [2, 2, 2, 3, 4.5, 6.75, 10.125, 15.1875, 22.78125, 34.171875, 50, 50]


def test_row_is_asked_along_at_once_when_somebody_comes() -> None:
    d = ticking_driver()
    d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    assert d.core.schedule() is None
    d.add(3, max_tokens=1)
    assert d.next_rows() == [("r1", 5, 1), ("r2", 0, 3)]
    d.answer(row_statuses=[NOT_SAMPLED, OK], token_ids=[-1, 5])
    assert d.core.schedule() is None


def test_steps_in_flight_do_not_have_a_row_asked_alone() -> None:
    d = ticking_driver()
    d.add(6, grammar=SCHEMA)
    d.add(3)
    d.plan()
    d.answer(row_statuses=[NOT_SAMPLED, OK], token_ids=[-1, 5])
    assert len(d.next_rows()) == 2
    d.core.abort("r2")
    assert d.core.schedule() is None


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_request_ends_when_its_grammar_compiles_for_a_minute(
    num_sequences: int,
) -> None:
    d = ticking_driver(max_num_seqs=4)
    request, other = d.add(6, grammar=SCHEMA, n=num_sequences), d.add(6)
    while not request.is_finished:
        plan = d.plan()
        assert plan is not None
        asked = [name == "r1" for name, _, _ in d.rows_of(plan)]
        d.core.tick(d.core.placement.now_ns + MAX_UNSAMPLED_NS // 20)
        d.answer(
            row_statuses=[NOT_SAMPLED if is_asked else OK for is_asked in asked],
            token_ids=[-1 if is_asked else 5 for is_asked in asked],
        )
        assert d.core.placement.now_ns <= START_NS + MAX_UNSAMPLED_NS * 1.2
    assert request.error == ("ROW_FAILED", "the executor did not compile the grammar within 60 s")
    assert not other.is_finished
    assert d.next_rows()[0][0] == "r2"
    d.run()


def test_minute_begins_anew_when_a_row_came_back() -> None:
    d = ticking_driver()
    request = d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    d.preempt(request)
    d.core.tick(START_NS + 2 * MAX_UNSAMPLED_NS)
    ask_in_vain(d)
    ask_in_vain(d)
    assert not request.is_finished
