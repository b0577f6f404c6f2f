"""Rows that get no token as long as their grammar is not compiled: when they are asked again."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.outcomes.losses import MAX_UNSAMPLED_NS
from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.plan import RowStatus
from scheduler_service.scheduler.values.sampling_params import Grammar
from tests.support.core.driver import CoreDriver

SCHEMA = Grammar("json_schema", ("{}",))
OK, NOT_SAMPLED = RowStatus.OK, RowStatus.NOT_SAMPLED
MS = 10**6
START_NS = 7 * MS


def driver(**options: object) -> CoreDriver:
    values = {"features": frozenset(Feature), "prefix_caching": False} | options
    d = CoreDriver(**values)  # type: ignore[arg-type]
    d.core.tick(START_NS)
    return d


def ask_in_vain(d: CoreDriver) -> None:
    """The next step is of one row alone, which gets no token."""
    assert d.plan() is not None
    d.answer(row_statuses=[NOT_SAMPLED], token_ids=[-1])


def test_row_is_asked_again_a_moment_later_when_there_is_nothing_else_to_do() -> None:
    d = driver()
    d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    assert d.core.schedule() is None
    assert d.core.ask_again_at_ns == START_NS + 2 * MS
    d.core.tick(START_NS + 2 * MS)
    assert d.next_rows() == [("r1", 5, 1)]
    assert d.core.ask_again_at_ns is None


def test_pauses_grow_with_the_time_that_a_row_has_waited() -> None:
    d = driver()
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
    d = driver()
    d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    assert d.core.schedule() is None
    d.add(3, max_tokens=1)
    assert d.next_rows() == [("r1", 5, 1), ("r2", 0, 3)]
    d.answer(row_statuses=[NOT_SAMPLED, OK], token_ids=[-1, 5])
    assert d.core.schedule() is None


def test_row_goes_on_at_once_when_it_has_its_first_token() -> None:
    d = driver()
    d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    d.add(3, grammar=SCHEMA)
    assert d.next_rows() == [("r1", 5, 1), ("r2", 0, 3)]
    # It has a token before it would have been asked alone; the other one has none.
    d.answer(row_statuses=[OK, NOT_SAMPLED], token_ids=[5, -1])
    assert d.core.schedule() is not None


def test_steps_in_flight_do_not_have_a_row_asked_alone() -> None:
    d = driver()
    d.add(6, grammar=SCHEMA)
    d.add(3)
    d.plan()
    d.answer(row_statuses=[NOT_SAMPLED, OK], token_ids=[-1, 5])
    assert len(d.next_rows()) == 2
    d.core.abort("r2")
    assert d.core.schedule() is None


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_request_ends_alone_when_its_grammar_is_not_compiled_in_a_minute(
    num_sequences: int,
) -> None:
    d = driver(max_num_seqs=4)
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
    assert request.error == ("ROW_FAILED", "the executor has not compiled its grammar in 60 s")
    assert not other.is_finished
    assert d.next_rows()[0][0] == "r2"
    d.run()


def test_minute_begins_anew_when_a_row_came_back() -> None:
    d = driver()
    request = d.add(6, grammar=SCHEMA)
    ask_in_vain(d)
    d.preempt(request)
    d.core.tick(START_NS + 2 * MAX_UNSAMPLED_NS)
    ask_in_vain(d)
    ask_in_vain(d)
    assert not request.is_finished
