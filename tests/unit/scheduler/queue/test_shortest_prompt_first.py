"""A policy of a user, added as CONTRIBUTING says: what it orders, and what it leaves alone."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.queue import QUEUE_POLICIES, Key, QueuePolicy, queue_policy
from scheduler_service.scheduler.values import Request
from tests.support.core.driver import CoreDriver, names


class ShortestPromptFirst(QueuePolicy):
    """The shortest prompt first."""

    def key(self, request: Request) -> Key:
        return (request.sequence.num_prompt_tokens,)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = {**QUEUE_POLICIES, "shortest": lambda _: ShortestPromptFirst()}
    monkeypatch.setattr(queue_policy, "QUEUE_POLICIES", policies)


def a_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {"queue_policy": "shortest", "prefix_caching": False}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def test_shortest_prompt_begins_first_when_several_wait() -> None:
    driver = a_driver(max_num_batched_tokens=9)
    for num_tokens in (9, 5, 3, 4):
        driver.add(num_tokens, f"of {num_tokens}", max_tokens=1)
    begun = []
    for _ in range(3):
        begun.append(names(driver.next_rows()))
        driver.answer()
    assert begun == [["of 3", "of 4", "of 5"], ["of 5", "of 9"], ["of 9"]]


def test_decodes_go_on_when_shorter_prompts_keep_arriving() -> None:
    driver = a_driver(max_num_batched_tokens=12, num_device_blocks=200, max_num_seqs=12)
    for number in range(3):
        driver.add(30 + number, f"long {number}", max_tokens=150)
    for number in range(80):
        driver.add(1 + number % 9, f"short {number % 16}.{number}", max_tokens=3)
        rows = driver.core.placement.rows
        order = rows.order
        is_decode = rows.num_tokens[order] - rows.num_computed[order] == 1
        decoding = {rows.sequence(i).request.request_id for i in order[is_decode].tolist()}
        assert decoding <= set(names(driver.next_rows()))
        driver.answer()
    assert all(f"long {number}" in names(driver.next_rows()) for number in range(3))
