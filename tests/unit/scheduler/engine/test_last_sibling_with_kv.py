"""Sequences of a request share the KV of one that ends before they have joined."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.values.plan import StepStatus
from scheduler_service.scheduler.values.request import SchedulingParams, SequenceStatus
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import EOS, CoreDriver
from tests.support.core.parts import growing_rows

PROMPT = list(range(1, 14))
UNCACHED = SchedulingParams(uses_prefix_cache=False)


@pytest.mark.parametrize("length", [11, 12, 13])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [{"n": 4}, {"best_of": 4}])
def test_prompt_is_computed_once_when_every_sequence_ends_with_its_first_token(
    params: dict[str, Any], depth: int, length: int
) -> None:
    engine = CheckedEngine(depth=depth, prefix_caching=False)
    engine.add(PROMPT[:length], max_tokens=1, **params)
    engine.engine.fill()
    num_tokens = 0
    while engine.engine.in_flight:
        num_tokens += engine.engine.in_flight[0][0].num_tokens
        engine.answer()
        engine.engine.fill()
    # Each of the others computes the last token of the prompt.
    assert num_tokens == length + 3
    engine.run()


def test_siblings_join_in_one_step_when_the_first_ends_at_once() -> None:
    driver = CoreDriver(prefix_caching=False)
    driver.add(PROMPT, n=3)
    assert driver.next_rows() == [("r1", 0, 13)]
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("r1", 12, 1), ("r1", 12, 1)]


def test_prompt_is_computed_once_when_only_the_request_does_without_the_cache() -> None:
    driver = CoreDriver()
    driver.add(PROMPT, n=2, scheduling=UNCACHED)
    driver.plan()
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("r1", 12, 1)]


def test_siblings_keep_their_rows_when_the_first_ends_at_once_and_others_wait() -> None:
    driver = CoreDriver(max_num_seqs=2)
    driver.add(PROMPT, "several", n=2)
    driver.add([50, 51], "next")
    driver.plan()
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("several", 12, 1), ("next", 0, 2)]


def test_sibling_goes_its_own_way_when_it_resumes_with_other_tokens() -> None:
    driver = CoreDriver(prefix_caching=False)
    driver.add(PROMPT, n=2, resume=[[20], [30, 31]])
    assert driver.next_rows() == [("r1", 0, 14)]
    driver.answer(token_ids=[EOS])
    assert driver.next_rows() == [("r1", 13, 2)]


def test_sibling_computes_the_prompt_again_when_no_block_is_free_for_it() -> None:
    driver = CoreDriver(num_device_blocks=3, prefix_caching=False)
    request = driver.add(6, "several", n=2)
    driver.plan()
    driver.core.placement.blocks.device.allocate(1)
    driver.answer(token_ids=[EOS])
    assert request.sequences[1].status is SequenceStatus.WAITING
    assert driver.next_rows() == [("several", 0, 6)]


def test_sibling_computes_the_prompt_again_when_what_it_needs_is_behind_a_window() -> None:
    driver = CoreDriver(block_size=2, sliding_window=4, prefix_caching=False)
    request = driver.add(PROMPT, n=2)
    driver.step()
    assert driver.next_rows() == [("r1", 6, 7)]
    growing_rows(driver).grow()
    driver.answer(token_ids=[EOS])
    assert request.sequences[1].status is SequenceStatus.WAITING
    assert driver.next_rows() == [("r1", 0, 6)]


def test_sibling_is_computed_again_when_what_it_is_to_copy_was_never_written() -> None:
    driver = CoreDriver(num_device_blocks=5, prefix_caching=False)
    driver.add(8, "short", max_tokens=1)
    request = driver.add(6, "several", n=2, stop_token_ids=frozenset({42}))
    driver.add(4, "other", max_tokens=1)
    assert len(driver.next_rows()) == 3
    # The second sequence finds no block until the first step is answered.
    assert [driver.next_rows() for _ in range(2)] == [[("several", 6, 1)], [("several", 7, 1)]]
    driver.answer()
    driver.answer(token_ids=[42])
    assert request.sequences[1].status is SequenceStatus.RUNNING
    driver.answer(StepStatus.FAILED)
    assert driver.next_rows() == [("several", 0, 6)]
