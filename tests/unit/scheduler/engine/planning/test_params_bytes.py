"""Lists and texts among sampling parameters: a step has room for those of all that run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from executor_service.service.encode_answer import encode_info
from scheduler_service.config import ClusterConfig
from scheduler_service.executors.handshake import core_config
from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES
from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.plan import StepPlan, StepStatus
from scheduler_service.scheduler.values.request import RequestStatus, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import Grammar, SamplingParams
from scheduler_service.step_codec import encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc.domain_error import DomainError
from tests.support.core.driver import CoreDriver, make_config, names
from tests.support.core.in_process import executor_info

ALL = frozenset(Feature)
KIB = 1024
MESSAGE_BYTES = 256 * KIB


def driver(most: int | None, **options: object) -> CoreDriver:
    values = {"features": ALL, "prefix_caching": False, "max_params_bytes": most}
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def grammar(number: int, num_bytes: int) -> Grammar:
    return Grammar("lark", (f"{number}".rjust(num_bytes, "x"),))


def num_bytes(plan: StepPlan) -> int:
    return len(encode_plan(plan, scheduler_epoch=1, executor_epoch=1).data)


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_steps_fit_their_message_when_many_rows_bring_large_grammars(is_snapshot: bool) -> None:
    info = encode_info(executor_info(make_config(), epoch=1))
    info.limits.max_message_bytes = MESSAGE_BYTES
    most = core_config(info, ClusterConfig()).max_params_bytes
    d = driver(most, max_num_seqs=64, num_device_blocks=400, max_num_waiting=100)
    requests = [d.add(6, grammar=grammar(i, 30 * KIB), max_tokens=3) for i in range(24)]
    others = [d.add(6, max_tokens=3) for _ in range(8)]
    sizes = []
    while plan := d.plan():
        sizes.append(num_bytes(plan))
        # A snapshot names all rows at once.
        is_lost = is_snapshot and plan.base_step_id is not None and len(sizes) % 5 == 0
        d.answer(StepStatus.NEED_SNAPSHOT if is_lost else StepStatus.OK)
    assert max(sizes) <= MESSAGE_BYTES
    assert max(sizes) > MESSAGE_BYTES // 4
    assert all(request.error is None and request.is_finished for request in (*requests, *others))


def test_same_parameters_travel_once_when_many_rows_have_them() -> None:
    d = driver(None)
    for _ in range(8):
        d.add(6, grammar=grammar(1, 30 * KIB))
    plan = d.plan()
    assert plan is not None
    assert num_bytes(plan) < 32 * KIB


def test_parameters_are_encoded_once_when_a_snapshot_tells_them_again() -> None:
    d = driver(None)
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
    d = driver(None, vocab_size=2**24)
    request = d.make_request(3)
    request.params = params
    d.core.add(request)
    plan = d.plan()
    assert plan is not None
    plain = driver(None)
    plain.add(3)
    expected = num_bytes(plan) - num_bytes(plain.plan() or plan)
    assert 0 < expected <= params.num_bytes + 64 <= 2 * expected + 8000


def test_request_waits_when_those_that_run_have_taken_the_bytes() -> None:
    d = driver(1000)
    for number in range(3):
        d.add(6, grammar=grammar(number, 450), max_tokens=2)
    d.add(6, "plain")
    assert names(d.next_rows()) == ["r1", "r2", "plain"]
    d.answer()
    d.step()
    assert "r3" in names(d.next_rows())


def test_request_is_refused_when_it_is_more_than_a_step_could_tell() -> None:
    d = driver(1000)
    with pytest.raises(DomainError, match="allowed: 1000") as caught:
        d.add(6, grammar=grammar(1, 1000))
    assert caught.value.reason == "SAMPLING_PARAMS_INVALID"
    assert not d.core.fits(d.make_request(6, grammar=grammar(1, 1000)))


def test_urgent_request_gets_the_bytes_of_others() -> None:
    d = driver(1000, queue_policy="priority")
    lazy = [d.add(6, grammar=grammar(i, 450), scheduling=SchedulingParams(2)) for i in range(2)]
    d.step()
    d.add(6, "urgent", grammar=grammar(3, 500), scheduling=SchedulingParams(-2))
    d.step()
    assert d.core.placement.requests["urgent"].status is RequestStatus.RUNNING
    assert [request.status for request in lazy] == [RequestStatus.RUNNING, RequestStatus.PREEMPTED]


def test_same_parameters_count_once_when_many_requests_have_them() -> None:
    d = driver(1000)
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


def test_only_what_is_told_counts_when_tokens_end_a_sequence() -> None:
    d = driver(1000, eos_token_ids=frozenset(range(80, 100)))
    d.add(6, stop_token_ids=frozenset(range(70, 85)))
    d.step()
    assert d.core.placement.params_sets.num_running_bytes == 0
    d.add(6, stop_token_ids=frozenset(range(70, 85)), min_tokens=1)
    d.step()
    assert d.core.placement.params_sets.num_running_bytes == 30 * 5


def test_request_is_refused_when_the_ends_of_the_model_are_more_than_a_step_could_tell() -> None:
    d = driver(50, eos_token_ids=frozenset(range(80, 100)))
    with pytest.raises(DomainError, match="up to 100 bytes; allowed: 50"):
        d.add(6, min_tokens=1)


def test_nobody_yields_bytes_when_he_has_none_to_yield() -> None:
    d = driver(1000, queue_policy="priority")
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
    d = driver(1000, queue_policy="priority")
    d.add(6, grammar=grammar(1, 800), scheduling=SchedulingParams(-3))
    lazy = [d.add(6, grammar=grammar(1, 800), scheduling=SchedulingParams(2)) for _ in range(3)]
    d.step()
    d.add(6, "urgent", grammar=grammar(3, 500), scheduling=SchedulingParams(-2))
    d.step()
    assert d.core.num_preemptions == 0
    assert all(request.status is RequestStatus.RUNNING for request in lazy)


def test_others_pass_when_the_first_in_line_lacks_bytes() -> None:
    d = driver(1000)
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


def test_all_wait_when_so_many_have_passed_the_one_that_lacks_bytes() -> None:
    d = driver(1000)
    d.add(6, "running", grammar=grammar(1, 600), max_tokens=50)
    d.step()
    first = d.add(6, "first", grammar=grammar(2, 600))
    first.num_bypasses = MAX_BYPASSES
    plain = d.add(6, "plain")
    d.step()
    assert plain.status is RequestStatus.WAITING
