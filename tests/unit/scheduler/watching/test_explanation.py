"""Whatever id somebody has in hand, it leads to the request."""

from __future__ import annotations

import pytest

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.explanation import MAX_FOUND, find_lives, near_ids
from scheduler_service.watching.life_recorder import LifeRecorder
from tests.support.core.some_turns import submitted

HEX = "0123456789abcdef0123456789abcdef"


def recorder_of(*names: RequestName) -> LifeRecorder:
    recorder = LifeRecorder(100, lambda: 0)
    for name in names:
        request = Request.create(name.key, [1], SamplingParams(), arrival=1, seed=1)
        recorder.see(submitted(request, name))
    return recorder


@pytest.mark.parametrize(
    ("asked", "upstream"),
    [
        ("mine", "mine"),
        (f"chatcmpl-{HEX}", f"{HEX}.0"),
        (f"cmpl-{HEX}", f"{HEX}.12"),
        (f"resp_{HEX}", f"{HEX}.0"),
        (f"req_{HEX}", f"{HEX}.0"),
        (f"req_{HEX}", f"job.7.{HEX}.0"),
        ("chatcmpl-job.7", f"job.7.{HEX}.0"),
        (f"{HEX}.3", f"{HEX}.3"),
        (f"req_{HEX}", f"{HEX}.0~2"),
    ],
)
def test_request_is_found_by_its_own_id_and_by_those_that_the_gateway_tells(
    asked: str, upstream: str
) -> None:
    recorder = recorder_of(RequestName(upstream), RequestName("another"), RequestName("ab.c"))
    assert [life.request_id for life in find_lives(recorder, asked)] == [upstream]


def test_all_that_an_id_may_mean_are_found_the_latest_first_and_not_too_many() -> None:
    tenants = recorder_of(RequestName("r", "a"), RequestName("r", "b"))
    assert [life.key for life in find_lives(tenants, "r")] == ["1:b:r", "1:a:r"]
    many = recorder_of(*(RequestName(f"{HEX}.{index}") for index in range(40)))
    found = find_lives(many, HEX)
    assert len(found) == MAX_FOUND
    assert found[0].request_id == f"{HEX}.39"


def test_ids_that_begin_or_end_alike_are_named_when_there_is_none() -> None:
    recorder = recorder_of(RequestName("request-12"), RequestName("x-quest-12"), RequestName("y"))
    assert find_lives(recorder, "request-13") == []
    assert near_ids(recorder, "request-13") == ["request-12"]
    assert near_ids(recorder, "") == []
    assert near_ids(recorder, "z" * 100_000) == []


@pytest.mark.parametrize(
    ("asked", "upstream"),
    [
        ("job-17", ["job-1735"]),
        (f"req_{HEX[:9]}", [f"{HEX}.1", f"{HEX}.0"]),
        (f"chatcmpl-{HEX[:9]}", [f"{HEX}.1", f"{HEX}.0"]),
        ("batch-9", [f"batch-99.{HEX[::-1]}.0"]),
        ("job-1", []),
        ("job-18", []),
    ],
)
def test_request_is_found_by_how_its_id_begins_when_that_is_of_one_alone(
    asked: str, upstream: list[str]
) -> None:
    ids = ("job-1735", "job-181", "job-182", f"{HEX}.0", f"{HEX}.1", f"batch-99.{HEX[::-1]}.0")
    recorder = recorder_of(*map(RequestName, ids))
    assert [life.request_id for life in find_lives(recorder, asked)] == upstream


def test_name_of_a_key_is_that_of_its_tenant() -> None:
    for name in (RequestName("r"), RequestName("r", "team"), RequestName("2:ab:r", "ab")):
        assert RequestName.of_key(name.key, name.tenant or "") == name
