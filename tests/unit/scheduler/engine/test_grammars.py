"""Rows with a grammar: refused by name, asked again until it is compiled, then like any other."""

from __future__ import annotations

from itertools import count

import pytest

from executor_service.steps.step import StepInput
from scheduler_service.scheduler.values.config import Feature, PreemptionMode
from scheduler_service.scheduler.values.plan import RowStatus, StepPlan
from scheduler_service.scheduler.values.sampling_params import (
    BeamParams,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from splitserve_rpc.domain_error import DomainError
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import VOCAB_SIZE, CoreDriver
from tests.support.fakes.fake_runner import StepFault

OK, NOT_SAMPLED, GRAMMAR_INVALID = RowStatus.OK, RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID
SCHEMA = Grammar("json_schema", ("{}",))
ALL = frozenset(Feature)


def driver(**config: object) -> CoreDriver:
    return CoreDriver(**({"features": ALL, "prefix_caching": False} | config))  # type: ignore[arg-type]


def planned(driver: CoreDriver) -> StepPlan:
    plan = driver.plan()
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
def test_request_is_refused_by_name_when_its_grammar_cannot_be_kept_to(
    params: dict[str, object], named: str
) -> None:
    with pytest.raises(DomainError) as caught:
        driver().add(3, **({"grammar": SCHEMA} | params))  # type: ignore[arg-type]
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"
    assert named in caught.value.message


def test_request_is_refused_when_the_model_has_no_token_to_end_it() -> None:
    with pytest.raises(DomainError, match="end-of-sequence") as caught:
        driver(eos_token_ids=frozenset()).add(3, grammar=SCHEMA)
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"


def test_request_is_refused_by_feature_when_the_executor_applies_no_grammars() -> None:
    core = driver(features=ALL - {Feature.GRAMMAR}).core
    request = CoreDriver().make_request(3, grammar=SCHEMA)
    assert not core.fits(request)
    with pytest.raises(DomainError, match="grammar") as caught:
        core.add(request)
    assert caught.value.reason == "FEATURE_UNSUPPORTED"


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark", "choices"])
def test_request_is_taken_when_its_grammar_is_as_large_as_allowed(kind: GrammarKind) -> None:
    texts = ("x" * 64,) * 1024 if kind == "choices" else ("x" * 65536,)
    driver().add(3, grammar=Grammar(kind, texts), n=2, best_of=3, num_logprobs=1, top_k=3)


# -- asked again -------------------------------------------------------------------------------


def test_row_is_not_scheduled_again_before_its_first_token_has_come() -> None:
    d = driver()
    d.add(6, grammar=SCHEMA)
    d.add(6)
    assert d.next_rows() == [("r1", 0, 6), ("r2", 0, 6)]
    assert d.next_rows() == [("r2", 6, 1)]


def test_last_token_alone_is_computed_again_when_it_was_not_sampled() -> None:
    d = driver()
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
    d = driver()
    d.add(6, grammar=SCHEMA)
    d.step()
    plan = planned(d)
    # The first is told to the executor, the second is the one that it samples for the first.
    assert (d.rows_of(plan), plan.work.token_ids.tolist()) == ([("r1", 6, 1)], [7])
    plan = planned(d)
    assert (d.rows_of(plan), plan.work.sampled_steps_back.tolist()) == ([("r1", 7, 1)], [1])


def test_others_go_on_when_a_row_is_asked_again() -> None:
    d = driver()
    d.add(6, grammar=SCHEMA)
    other = d.add(6)
    d.plan()
    d.plan()
    events = d.answer(row_statuses=[NOT_SAMPLED, OK], token_ids=[-1, 5])
    assert events.client_keys.tolist() == [other.client_key]
    assert sorted(d.next_rows()) == [("r1", 5, 1), ("r2", 7, 1)]


def test_row_promises_nothing_again_when_it_was_preempted() -> None:
    d = driver()
    request = d.add(6, grammar=SCHEMA)
    d.step()
    d.step()
    d.preempt(request)
    assert d.next_rows() == [("r1", 0, 8)]
    assert d.plan() is None
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
    assert d.next_rows() == [("r1", 7, 1)]


def test_token_counts_when_it_comes_after_a_preemption() -> None:
    d = driver()
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    d.preempt(request)
    assert d.answer(token_ids=[8]).tokens[0].token_id == 8
    assert request.sequence.num_promised == 0
    assert d.next_rows() == [("r1", 0, 7)]


@pytest.mark.parametrize("status", [OK, NOT_SAMPLED])
def test_swapped_row_goes_on_where_it_was_when_its_step_is_answered(status: RowStatus) -> None:
    d = driver(num_host_blocks=64, preemption_mode=PreemptionMode.SWAP)
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    d.preempt(request)
    d.answer(row_statuses=[status], token_ids=[8 if status is OK else -1])
    d.step()  # it is moved
    assert d.next_rows() == [("r1", 6, 1) if status is OK else ("r1", 5, 1)]


# -- who says so -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [NOT_SAMPLED, GRAMMAR_INVALID])
def test_row_fails_alone_when_it_has_no_grammar(status: RowStatus) -> None:
    d = driver()
    request, other = d.add(6), d.add(5)
    d.plan()
    events = d.answer(row_statuses=[status, OK], token_ids=[-1, 5])
    assert events.finished == [request]
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"
    assert "no grammar" in request.error[1]
    assert events.client_keys.tolist() == [other.client_key]


def test_row_fails_when_it_is_not_sampled_after_its_first_token() -> None:
    d = driver()
    request = d.add(6, grammar=SCHEMA)
    d.step()
    d.plan()
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


@pytest.mark.parametrize("status", [NOT_SAMPLED, GRAMMAR_INVALID])
def test_row_fails_when_its_prompt_was_not_to_be_sampled(status: RowStatus) -> None:
    d = driver(max_num_batched_tokens=4, max_num_seqs=4)
    request = d.add(6, grammar=SCHEMA)
    d.plan()
    d.answer(row_statuses=[status], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


def test_row_fails_when_it_left_with_a_promise_and_is_then_not_sampled() -> None:
    d = driver()
    request = d.add(6, grammar=SCHEMA)
    d.step()
    d.plan()
    d.preempt(request)
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


def test_nobody_else_loses_anything_when_a_grammar_is_invalid() -> None:
    d = driver(prefix_caching=True)
    prompt = list(range(1, 10))
    request, other = d.add(prompt, grammar=SCHEMA), d.add([*prompt, 20, 21])
    rows = d.next_rows()
    assert rows[0] == (request.request_id, 0, 9)
    assert rows[1] == (other.request_id, 8, 3)  # it leans on what the first one writes
    events = d.answer(row_statuses=[GRAMMAR_INVALID, OK], token_ids=[-1, 5])
    assert request.error == ("GRAMMAR_INVALID", "the executor could not compute it")
    assert events.client_keys.tolist() == [other.client_key]
    assert d.next_rows() == [(other.request_id, 11, 1)]
    assert d.core.num_cached_blocks == 2


# -- what rows read ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", range(1, 9))
def test_last_token_finds_its_window_when_it_is_computed_again(window: int) -> None:
    d = driver(sliding_window=window)
    request = d.add(11, grammar=SCHEMA)
    while d.plan():
        pass  # the last time, what lies behind the window of the next token could be given back
    while len(d.in_flight) > 1:
        d.answer()
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])
    assert d.next_rows() == [("r1", 10, 1)]
    rows, row_id = d.core.placement.rows, request.sequence.row_id
    assert min(rows.block_table(row_id)[max(0, 11 - window) // 4 :]) >= 0
    d.answer()
    d.plan()
    assert rows.num_released[row_id] == max(0, 12 - window) // 4


def test_prompt_logprobs_are_told_when_the_row_was_not_sampled() -> None:
    asked = count()

    def fault(step: StepInput) -> StepFault:
        return StepFault(unsampled=step.row_ids.tolist() if next(asked) < 2 else ())

    engine = CheckedEngine(fault=fault, eos_token_ids=frozenset({VOCAB_SIZE - 1}))
    request = engine.add([1, 2, 3, 4], grammar=SCHEMA, max_tokens=2, num_prompt_logprobs=0)
    engine.engine.fill()
    events = engine.answer()
    assert [score.position for _, scores in events.prompt_logprobs for score in scores] == [1, 2, 3]
    engine.drain()
    assert request.error is None


def test_invalid_grammar_is_what_is_told_when_the_prompt_has_no_scores() -> None:
    d = driver()
    request = d.add([1, 2, 3, 4], grammar=SCHEMA, num_prompt_logprobs=1)
    d.plan()
    d.answer(row_statuses=[GRAMMAR_INVALID], token_ids=[-1])
    assert request.error is not None
    assert request.error[0] == "GRAMMAR_INVALID"


def test_params_of_a_row_have_the_grammar_when_others_are_replaced() -> None:
    request = CoreDriver().make_request(3, grammar=SCHEMA, best_of=2, bad_words_token_ids=((1,),))
    assert request.row_params.grammar is SCHEMA
    assert SamplingParams(grammar=SCHEMA).needs_history
