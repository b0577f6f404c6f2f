"""Admission: who begins, who passes whom, who makes way, and for which resource."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from executor_service.service import encode_info
from scheduler_service.config import ClusterConfig
from scheduler_service.executors import core_config
from scheduler_service.scheduler.engine.planning import MAX_BYPASSES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Feature,
    Grammar,
    PreemptionMode,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulingParams,
    StepPlan,
    StepStatus,
)
from scheduler_service.step_codec import encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from tests.support.core.driver import CoreDriver, make_config, names
from tests.support.core.in_process import CheckedEngine, executor_info


def adapter(name: str) -> SchedulingParams:
    return SchedulingParams(adapter=name)


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "features": frozenset({Feature.ADAPTERS}),
        "max_adapters": 1,
        "prefix_caching": False,
        "max_num_waiting": 200,
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


# -- adapters ----------------------------------------------------------------------------------


def test_admit_passes_a_request_when_its_adapter_has_no_slot() -> None:
    driver = make_driver()
    driver.add(3, "a1", scheduling=adapter("a"))
    driver.add(3, "b1", scheduling=adapter("b"))
    driver.add(3, "a2", scheduling=adapter("a"))
    driver.add(3, "none")
    assert names(driver.next_rows()) == ["a1", "a2", "none"]


def test_admit_gives_a_free_adapter_slot_to_the_oldest() -> None:
    driver = make_driver()
    driver.add(3, "a1", scheduling=adapter("a"), max_tokens=1)
    driver.add(3, "b1", scheduling=adapter("b"))
    driver.add(3, "c1", scheduling=adapter("c"))
    driver.step()
    driver.add(3, "a2", scheduling=adapter("a"))
    assert names(driver.next_rows()) == ["b1"]


def test_adapters_stop_passing_a_request_after_max_bypasses() -> None:
    driver = make_driver(max_num_seqs=100)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=180)
    limited = driver.add(1, "b", scheduling=adapter("b"), max_tokens=1)
    passed_by = 0
    for number in range(2 * MAX_BYPASSES):
        driver.add(1, f"p{number}", scheduling=adapter("a"), max_tokens=1)
        if f"p{number}" in names(driver.next_rows()):
            passed_by += 1
        driver.answer()
    assert passed_by == MAX_BYPASSES
    assert limited.status is RequestStatus.WAITING
    driver.core.abort("a")
    assert names(driver.next_rows())[0] == "b"


# -- blocks and rows ---------------------------------------------------------------------------


def start_large(driver: CoreDriver) -> Request:
    """Fills most of a pool of 8 blocks; a large request then waits, and a small one behind it."""
    driver.add(17, "running", max_tokens=60 // 4)
    driver.step()
    large = driver.add(16, "large", max_tokens=1)
    driver.add(2, "small", max_tokens=1)
    return large


@pytest.mark.parametrize(
    ("policy", "num_bypasses", "running"),
    [
        ("fcfs", 0, ["running"]),
        ("priority", 0, ["running", "small"]),
        ("fair", 0, ["running", "small"]),
        ("deadline", 0, ["running", "small"]),
        ("priority", MAX_BYPASSES, ["running"]),
    ],
)
def test_admit_lets_small_requests_pass_when_the_policy_allows_it(
    policy: str, num_bypasses: int, running: list[str]
) -> None:
    driver = make_driver(num_device_blocks=8, queue_policy=policy)
    large = start_large(driver)
    large.num_bypasses = num_bypasses
    assert names(driver.next_rows()) == running
    assert large.num_bypasses == num_bypasses + ("small" in running)


def test_admit_lets_nobody_pass_when_only_the_budget_is_spent() -> None:
    driver = make_driver(max_num_batched_tokens=8, batch_policy=BatchPolicyName.PREFILL_FIRST)
    driver.add(6, "first")
    driver.add(6, "second")
    driver.add(2, "third")
    assert names(driver.next_rows()) == ["first"]


# -- swapped requests --------------------------------------------------------------------------


def swapped_driver(max_tokens: int = 9, **options: object) -> tuple[CoreDriver, Request]:
    """A request is swapped out, another runs."""
    values: dict[str, object] = {
        "num_device_blocks": 12,
        "num_host_blocks": 12,
        "preemption_mode": PreemptionMode.SWAP,
    }
    driver = make_driver(**(values | options))
    driver.add(14, "running", max_tokens=max_tokens)
    swapped = driver.add(14, "swapped", max_tokens=9)
    driver.step()
    driver.preempt(swapped)
    return driver, swapped


def test_swap_in_waits_when_the_step_swaps_out() -> None:
    driver, _ = swapped_driver()
    plan, _ = driver.step()
    assert plan.moves.swap_out
    assert not plan.moves.swap_in
    assert driver.step()[0].moves.swap_in


def test_admit_takes_nobody_younger_than_a_swapped_request() -> None:
    driver, swapped = swapped_driver(num_device_blocks=8)
    driver.step()
    driver.add(1, "small")
    assert driver.core.num_free_blocks == 4
    assert names(driver.next_rows()) == ["running"]
    assert swapped.status is RequestStatus.SWAPPED


def test_admit_takes_nobody_younger_when_no_decode_can_run() -> None:
    driver, _ = swapped_driver(
        num_device_blocks=8, batch_policy=BatchPolicyName.PREFILL_FIRST, max_tokens=3
    )
    driver.step()
    driver.add(1, "small")
    assert names(driver.next_rows()) == ["running"]  # Its last token is on its way.
    assert driver.plan() is None


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_victim_stays_away_while_its_blocks_are_moved(
    batch_policy: BatchPolicyName, depth: int
) -> None:
    driver = make_driver(
        num_device_blocks=12,
        num_host_blocks=12,
        preemption_mode=PreemptionMode.SWAP,
        queue_policy="priority",
        batch_policy=batch_policy,
        max_num_seqs=2,
    )
    slow = driver.add(14, "slow", max_tokens=30)
    driver.step()
    for _ in range(depth - 1):
        driver.plan()
    # There are blocks for it to come back, but neither blocks nor a row for the other beside it.
    urgency = SchedulingParams(priority=-1)
    urgent = driver.add(33, "urgent", scheduling=urgency, max_tokens=2, n=2)
    while not urgent.is_finished:
        while len(driver.in_flight) < depth and driver.plan() is not None:
            assert urgent.is_finished or slow.status is not RequestStatus.RUNNING
        driver.answer()
    assert urgent.error is None


PATIENT = SchedulingParams(priority=1)


def swapping_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "num_host_blocks": 12,
        "preemption_mode": PreemptionMode.SWAP,
        "prefix_caching": False,
        "queue_policy": "priority",
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def test_nobody_makes_way_when_the_step_swaps_somebody_in() -> None:
    driver = swapping_driver(num_device_blocks=11)
    driver.add(14, scheduling=PATIENT)
    swapped = driver.add(14)
    driver.step()
    driver.preempt(swapped)
    driver.step()
    driver.add(14, "urgent")
    back, _ = driver.step()
    assert back.moves.swap_in
    assert not back.moves.swap_out
    assert driver.step()[0].moves.swap_out, "now the patient one makes way"


def test_nobody_makes_way_when_the_step_gives_it_a_row() -> None:
    driver = swapping_driver(num_device_blocks=8)
    patient = driver.add(9, n=2, scheduling=PATIENT)
    driver.step()
    urgent = driver.add(17)
    joined, _ = driver.step()
    assert joined.new_rows
    assert (patient.status, urgent.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    driver.step()
    assert (patient.status, urgent.status) == (RequestStatus.SWAPPED, RequestStatus.RUNNING)


def test_urgent_request_misses_a_prefix_that_its_victims_evicted() -> None:
    engine = CheckedEngine(
        num_device_blocks=6,
        num_host_blocks=6,
        preemption_mode=PreemptionMode.SWAP,
        queue_policy="priority",
    )
    prefix = list(range(1, 10))
    engine.add(prefix, max_tokens=1)
    engine.run()
    patient = engine.add(list(range(20, 42)), scheduling=PATIENT, max_tokens=2)
    engine.step()
    host = engine.core.placement.blocks.host
    assert host.num_published == 2
    urgent = engine.add([*prefix, 50], max_tokens=2)
    assert engine.core.placement.blocks.prefixes.find(urgent.sequence).num_tokens == 8
    engine.step()
    assert patient.status is RequestStatus.SWAPPED
    assert urgent.num_cached_tokens == 0
    engine.run()


ALL = frozenset(Feature)
KIB = 1024
MESSAGE_BYTES = 256 * KIB


def params_driver(most: int | None, **options: object) -> CoreDriver:
    values = {"features": ALL, "prefix_caching": False, "max_params_bytes": most}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def grammar(number: int, message_bytes: int) -> Grammar:
    return Grammar("lark", (f"{number}".rjust(message_bytes, "x"),))


def message_bytes(plan: StepPlan) -> int:
    return len(encode_plan(plan, scheduler_epoch=1, executor_epoch=1).data)


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_steps_fit_their_message_when_many_rows_bring_large_grammars(is_snapshot: bool) -> None:
    info = encode_info(executor_info(make_config(), epoch=1))
    info.limits.max_message_bytes = MESSAGE_BYTES
    most = core_config(info, ClusterConfig()).max_params_bytes
    d = params_driver(most, max_num_seqs=64, num_device_blocks=400, max_num_waiting=100)
    requests = [d.add(6, grammar=grammar(i, 30 * KIB), max_tokens=3) for i in range(24)]
    others = [d.add(6, max_tokens=3) for _ in range(8)]
    sizes = []
    while plan := d.plan():
        sizes.append(message_bytes(plan))
        # A snapshot names all rows at once.
        is_lost = is_snapshot and plan.base_step_id is not None and len(sizes) % 5 == 0
        d.answer(StepStatus.NEED_SNAPSHOT if is_lost else StepStatus.OK)
    assert max(sizes) <= MESSAGE_BYTES
    assert max(sizes) > MESSAGE_BYTES // 4
    assert all(request.error is None and request.is_finished for request in (*requests, *others))


def test_parameters_are_encoded_once_when_a_snapshot_tells_them_again() -> None:
    d = params_driver(None)
    requests = [d.add(6, grammar=grammar(number, 100)) for number in (1, 2, 1)]
    plan = d.plan()
    assert plan is not None
    first = _new_rows(plan)
    encoded = [request.params_set.encoded for request in requests]
    d.answer()
    d.plan()
    d.answer(StepStatus.NEED_SNAPSHOT)
    plan = d.plan()
    assert plan is not None
    assert _new_rows(plan).sampling_params == first.sampling_params
    assert [each.grammar.lark.strip("x") for each in first.sampling_params] == ["1", "2"]
    assert first.sampling_params_indexes == np.array([0, 1, 0], "<i4").tobytes()
    again = [request.params_set.encoded for request in requests]
    assert None not in encoded
    assert [one is other for one, other in zip(encoded, again, strict=True)] == [True] * 3


def _new_rows(plan: StepPlan) -> pb.NewRows:
    data = encode_plan(plan, scheduler_epoch=1, executor_epoch=1).data
    return pb.ScheduleBatch.FromString(data).new_rows


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={2**24 - 1 - i: -math.inf for i in range(1024)}),
        SamplingParams(allowed_token_ids=frozenset(range(2**24 - 16384, 2**24))),
        SamplingParams(bad_words_token_ids=((2**24 - 1,) * 8,) * 1024),
        SamplingParams(stop_token_ids=frozenset(range(2**24 - 256, 2**24)), min_tokens=1),
        SamplingParams(grammar=Grammar("regex", ("é" * 32768,))),
        SamplingParams(grammar=Grammar("choices", ("x" * 64,) * 1024)),
        SamplingParams(grammar=Grammar("choices", ("x",) * 1024)),
    ],
)
def test_bytes_are_at_least_what_is_sent(params: SamplingParams) -> None:
    d = params_driver(None, vocab_size=2**24)
    request = d.make_request(3)
    request.params = params
    d.core.add(request)
    plan = d.plan()
    assert plan is not None
    plain = params_driver(None)
    plain.add(3)
    expected = message_bytes(plan) - message_bytes(plain.plan() or plan)
    assert 0 < expected <= params.num_bytes + 64 <= 2 * expected + 8000


def test_request_waits_when_those_that_run_have_taken_the_bytes() -> None:
    d = params_driver(1000)
    for number in range(3):
        d.add(6, grammar=grammar(number, 450), max_tokens=2)
    d.add(6, "plain")
    assert names(d.next_rows()) == ["r1", "r2", "plain"]
    d.answer()
    d.step()
    assert "r3" in names(d.next_rows())


def test_same_parameters_count_once_when_many_requests_have_them() -> None:
    d = params_driver(1000)
    shared = [d.add(6, grammar=grammar(1, 450), max_tokens=i + 1) for i in range(6)]
    own = d.add(6, grammar=grammar(2, 450))
    late = d.add(6, grammar=grammar(3, 450))
    d.step()
    assert all(request.status is not RequestStatus.WAITING for request in (*shared, own))
    assert late.status is RequestStatus.WAITING
    assert d.core.placement.params_sets.num_running_bytes == 2 * 455
    while not all(request.is_finished for request in shared):
        assert "r8" not in names(d.next_rows())
        d.answer()
    assert "r8" in names(d.next_rows())


@pytest.mark.parametrize("params", [{"grammar": grammar(1, 100)}, {"min_tokens": 1}], ids=list)
def test_request_is_refused_when_no_step_could_tell_it(params: dict[str, Any]) -> None:
    # With `min_tokens`, all tokens that end a sequence are told.
    d = params_driver(50, eos_token_ids=frozenset(range(80, 100)))
    with pytest.raises(DomainError, match="allowed: at most 50") as caught:
        d.add(6, **params)
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"
    assert not d.core.fits(d.make_request(6, **params))


def test_nobody_yields_bytes_when_he_has_none_to_yield() -> None:
    d = params_driver(1000, queue_policy="priority")
    lazy = SchedulingParams(2)
    plain = [d.add(6, scheduling=lazy) for _ in range(2)]
    first = d.add(6, grammar=grammar(1, 450), scheduling=lazy)
    shared = [d.add(6, grammar=grammar(2, 450), scheduling=lazy) for _ in range(2)]
    plain += [d.add(6, scheduling=lazy) for _ in range(2)]
    d.step()
    urgent = d.add(6, "urgent", grammar=grammar(3, 500), scheduling=SchedulingParams(-2))
    d.step()
    # The two are as good as one, and less urgent than the first.
    assert d.core.num_preemptions == 2
    assert [request.status for request in (*plain, first)] == [RequestStatus.RUNNING] * 5
    assert [request.status for request in (*shared, urgent)] == [
        RequestStatus.PREEMPTED,
        RequestStatus.PREEMPTED,
        RequestStatus.RUNNING,
    ]


def test_nobody_yields_when_some_keep_the_bytes_that_are_wanted() -> None:
    d = params_driver(1000, queue_policy="priority")
    d.add(6, grammar=grammar(1, 800), scheduling=SchedulingParams(-3))
    lazy = [d.add(6, grammar=grammar(1, 800), scheduling=SchedulingParams(2)) for _ in range(3)]
    d.step()
    d.add(6, "urgent", grammar=grammar(3, 500), scheduling=SchedulingParams(-2))
    d.step()
    assert d.core.num_preemptions == 0
    assert all(request.status is RequestStatus.RUNNING for request in lazy)


def test_others_pass_when_the_first_in_line_lacks_bytes() -> None:
    d = params_driver(1000)
    d.add(6, "running", grammar=grammar(1, 600), max_tokens=50)
    d.step()
    first = d.add(6, "first", grammar=grammar(2, 600))
    small = d.add(6, "small", grammar=grammar(3, 300))
    plain = d.add(6, "plain")
    same = d.add(6, "same", grammar=grammar(1, 600))
    d.step()
    assert (plain.status, same.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)
    # In order of arrival, nobody takes the bytes that come free before the first has them.
    assert (first.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
