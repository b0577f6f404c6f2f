"""Tests what watchers are told: blocks, names, rows, history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers import Admission
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import (
    DeliverTokens,
    Effect,
    Event,
    RequestFinished,
    RequestSubmitted,
    SendStep,
)
from scheduler_service.scheduler.engine import RowColumns
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.values import NewRow, Request, SamplingParams, StepEvents
from scheduler_service.watching import (
    NUM_POINTS,
    POINT_NS,
    BlockState,
    Durations,
    History,
    Names,
    NamesMark,
    PoolMap,
    RowOwners,
    Submission,
    block_states,
)
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live import Pool
from tests.support.core.machines import transition

NUM_BLOCKS = 12

Held = list[list[int]]


def worked_pool(data: st.DataObject) -> tuple[BlockPool, Held]:
    """A pool after any sequence of calls, and the tables that hold its blocks."""
    pool, tables = BlockPool(NUM_BLOCKS), Held()
    for number in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["allocate", "share", "free", "publish"])):
            case "allocate":
                count = data.draw(st.integers(0, pool.num_free))
                tables.append(pool.allocate(count))
            case "share" if tables:
                table = data.draw(st.sampled_from(tables))
                pool.share(table)
                tables.append(list(table))
            case "free" if tables:
                pool.free(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
            case "publish" if any(tables):
                table = data.draw(st.sampled_from([table for table in tables if table]))
                if pool.hash_of(table[0]) is None:
                    pool.publish(table[0], number.to_bytes(4, "big"))
            case _:
                pass
    return pool, tables


def expected_state(pool: BlockPool, block: int, given_back: list[int], moved: set[int]) -> int:
    if block in moved:
        return BlockState.ON_THE_MOVE
    count = pool.reference_count(block)
    if count == 0:
        return BlockState.FREE if pool.hash_of(block) is None else BlockState.CACHED
    if given_back.count(block) == count:
        return BlockState.GIVEN_BACK
    return BlockState.HELD if count == 1 else BlockState.SHARED


@given(st.data())
def test_block_states_are_those_of_the_pool(data: st.DataObject) -> None:
    pool, tables = worked_pool(data)
    some = data.draw(st.lists(st.sampled_from(tables), unique_by=id)) if tables else []
    given_back = [block for table in some for block in table]
    moved = data.draw(st.sets(st.integers(0, NUM_BLOCKS - 1)))
    assert block_states(pool, given_back, moved).tolist() == [
        expected_state(pool, block, given_back, moved) for block in range(NUM_BLOCKS)
    ]


@given(st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 3)), max_size=6))
def test_pool_map_tells_what_changed(
    moments: list[tuple[bytes, int]],
) -> None:
    before, seen = None, Pool()
    for states, holder in moments:
        told = live.LivePool()
        now = PoolMap(16, np.frombuffer(states, np.uint8), np.full(8, holder))
        now.fill_changes(before, told)
        seen.take(told)
        assert (bytes(seen.states), seen.holders) == (states, [holder] * 8)
        assert seen.block_size == 16
        before = now


def test_pool_map_tells_nothing_when_nothing_has_changed() -> None:
    before, now = (PoolMap(16, np.ones(4, np.uint8), np.arange(4)) for _ in range(2))
    again = live.LivePool()
    now.fill_changes(before, again)
    assert (again.num_blocks, list(again.changed), again.states) == (4, [], b"")


def test_block_with_many_references_is_shared() -> None:
    pool = BlockPool(NUM_BLOCKS)
    shared, alone = pool.allocate(2)
    for _ in range(300):
        pool.share([shared])

    states = block_states(pool, (), ())

    assert (states[shared], states[alone]) == (BlockState.SHARED, BlockState.HELD)


MAX_NAMES = 32


def some_request(number: int) -> Request:
    return Request.create(f"request-{number}", [1, 2, 3], SamplingParams(), arrival=number, seed=1)


@dataclass(slots=True)
class Told:
    """What one watcher knows."""

    mark: NamesMark | None = None
    names: dict[int, live.LiveRequest] = field(default_factory=dict)

    def take(self, names: Names, now: NamesMark) -> None:
        frame = live.WatchSchedulerResponse()
        names.fill(self.mark, now, frame)
        assert not (frame.forgets_requests and self.mark is None)
        if frame.forgets_requests:
            self.names.clear()
        self.names.update((name.number, name) for name in frame.new_requests)
        self.mark = now


class Serving:
    """Requests that come, begin and end, and their names."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.num_seen = 0
        self.submissions: dict[str, Submission] = {}
        self.names = Names(self.submissions, MAX_NAMES)

    def go_on(self, num_new: int, num_ended: int, num_begun: int) -> NamesMark:
        """A moment; what is used in it are the requests that have not ended."""
        for request_id in list(self.requests)[:num_ended]:
            del self.requests[request_id], self.submissions[request_id]
        for request in list(self.requests.values())[:num_begun]:
            request.stop_len = 9
        for _ in range(num_new):
            self.num_seen += 1
            request = some_request(self.num_seen)
            self.requests[request.request_id] = request
            admission = Admission(RequestName(request.request_id))
            self.submissions[request.request_id] = Submission(admission, submitted_ns=0)
        numbers = self.names.numbers_of(self.requests.values())
        self.names.tidy(lambda: set(numbers), self.requests.values)
        return self.names.mark


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.sets(st.integers(0, 2))
        ),
        max_size=60,
    )
)
def test_watchers_know_names_and_few_of_them(
    moments: list[tuple[int, int, int, set[int]]],
) -> None:
    serving, watchers = Serving(), [Told() for _ in range(3)]
    for num_new, num_ended, num_begun, looking in moments:
        # No more run than have names.
        num_ended = max(num_ended, len(serving.requests) + num_new - MAX_NAMES)
        now = serving.go_on(num_new, num_ended, num_begun)
        for watcher in [*(watchers[index] for index in sorted(looking)), Told()]:
            watcher.take(serving.names, now)
            assert len(watcher.names) <= MAX_NAMES
            for request in serving.requests.values():
                name = watcher.names[request.arrival]
                assert (name.request_id, name.stop_len) == (request.request_id, request.stop_len)


def test_names_are_told_once_while_nothing_changes() -> None:
    serving, watcher = Serving(), Told()
    watcher.take(serving.names, serving.go_on(3, 0, 0))
    frame = live.WatchSchedulerResponse()
    serving.names.fill(watcher.mark, serving.go_on(0, 0, 0), frame)
    assert not frame.new_requests


def test_names_of_running_requests_are_kept() -> None:
    serving, watcher = Serving(), Told()
    serving.go_on(4, 0, 0)
    first = list(serving.requests.values())
    # Between two looks, more come and go than names are kept.
    for number in range(100, 100 + 2 * MAX_NAMES):
        gone = some_request(number)
        serving.requests[gone.request_id] = gone
        serving.names.see([gone])
        del serving.requests[gone.request_id]
    watcher.take(serving.names, serving.go_on(3, 0, 0))
    assert {*watcher.names} >= {request.arrival for request in [*first, *serving.requests.values()]}


def test_name_is_told_anew_when_its_end_is_known() -> None:
    serving, watcher = Serving(), Told()
    watcher.take(serving.names, serving.go_on(2, 0, 0))
    watcher.take(serving.names, serving.go_on(0, 0, 1))
    assert [watcher.names[number].stop_len for number in (1, 2)] == [9, 0]


NUM_ROWS = 4
EMPTY = np.empty(0, np.int32)


@given(st.lists(st.tuples(st.integers(0, NUM_ROWS), st.booleans()), max_size=40))
def test_row_owners_are_those_of_the_rows(
    events: list[tuple[int, bool]],
) -> None:
    rows = RowColumns(NUM_ROWS, 64, 16, 4)
    owners, running, before = RowOwners(rows), list[Request](), set[int]()
    for number, (which, looks) in enumerate(events, 1):
        if which < len(running):
            rows.remove(running.pop(which).sequence)
        elif rows.num_free:
            prompt = [1] * (number % 7 + 1)
            request = Request.create(f"r{number}", prompt, SamplingParams(), arrival=number, seed=1)
            rows.add(request.sequence, (number,), 0)
            running.append(request)
        if looks:
            given_out, copy = owners.now, owners.now.copy()
            found = {request.arrival for request in owners.refresh()}
            now = {request.arrival for request in running}
            assert found == now - before
            before = now
            assert (given_out == copy).all()
            for request in running:
                number_of, num_prompt = owners.now[:, request.sequence.row_id].tolist()
                assert number_of == request.arrival
                assert num_prompt == request.sequence.num_prompt_tokens


def test_row_owners_change_with_each_plan_of_a_turn() -> None:
    rows = RowColumns(NUM_ROWS, 64, 16, 4)
    owners = RowOwners(rows)
    seen = []
    for number in (1, 2):
        prompt = [1] * number
        request = Request.create(f"r{number}", prompt, SamplingParams(), arrival=number, seed=1)
        owners.take([NewRow(request.sequence, 0, EMPTY, EMPTY)])
        seen.append(owners.now)

    assert [now[:, 0].tolist() for now in seen] == [[1, 1], [2, 2]]


_MS = 1_000_000
_POINT_S = POINT_NS / 1e9


class ToldHistory:
    """A history that is told by a clock that stands still between steps."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.history = History(lambda: self.now_ns)

    def submit(self, *keys: int) -> None:
        for key in keys:
            self.see(event=RequestSubmitted(_request(key)))

    def begin(self, *keys: int) -> None:
        """Gives each a row."""
        rows = [SimpleNamespace(sequence=SimpleNamespace(request=_request(key))) for key in keys]
        plan: Any = SimpleNamespace(new_rows=rows)
        self.see(SendStep("127.0.0.1:1", plan))

    def deliver(self, *keys: int, several: Iterable[int] = ()) -> None:
        """A token for each; of those of `several` as of requests with several sequences."""
        tokens: Any = [
            SimpleNamespace(sequence=SimpleNamespace(request=_request(key))) for key in several
        ]
        events = StepEvents(np.array(keys, np.int64), np.array(keys, np.int32), tokens)
        self.see(DeliverTokens(events))

    def end(self, key: int) -> None:
        self.see(RequestFinished(_request(key)))

    def see(self, *effects: Effect, event: Event | None = None) -> None:
        self.history.see(transition(*effects, event=event, now_ns=self.now_ns))

    def wait_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def points(self) -> list[live.LivePoint]:
        self.history.fill_recent(live.LiveLatency())
        found = []
        for point in self.history.points_after(-1):
            found.append(live.LivePoint())
            point.fill(found[-1])
        return found

    def recent(self) -> live.LiveLatency:
        told = live.LiveLatency()
        self.history.fill_recent(told)
        return told


def _request(key: int) -> Any:  # noqa: ANN401
    return SimpleNamespace(client_key=key)


def test_point_has_tokens_and_the_longest_queue() -> None:
    told = ToldHistory()
    told.submit(1, 2, 3)
    told.begin(1)
    told.deliver(1)
    told.wait_s(_POINT_S)
    told.deliver(1, several=[1, 1])
    told.begin(2, 3)
    told.wait_s(_POINT_S)
    first, second = told.points()
    assert (first.start_ms, first.num_tokens, first.num_waiting) == (0, 1, 3)
    # Two of them waited when it began.
    assert (second.start_ms, second.num_tokens, second.num_waiting) == (2000, 3, 2)


def test_time_to_first_token_is_counted_once() -> None:
    told = ToldHistory()
    told.submit(1, 2)
    told.wait_s(0.5)
    told.begin(1, 2)
    told.wait_s(0.1)
    told.deliver(1)
    told.wait_s(0.1)
    told.deliver(1, several=[2])
    told.deliver(1, 2)
    latency = told.recent()
    assert latency.count == 2
    assert latency.p50_us == pytest.approx(600_000, rel=0.025)
    assert latency.p99_us == pytest.approx(700_000, rel=0.025)


def test_recent_is_the_last_minute() -> None:
    told = ToldHistory()
    for duration_s in (1.0, 0.1):
        told.submit(1)
        told.begin(1)
        told.wait_s(duration_s)
        told.deliver(1)
        told.wait_s(50)
    assert told.recent().count == 1
    assert told.recent().p99_us == pytest.approx(100_000, rel=0.025)
    told.wait_s(60)
    assert told.recent().count == 0


def test_points_go_on_while_nothing_happens_and_some_wait() -> None:
    told = ToldHistory()
    told.submit(1)
    told.wait_s(4 * _POINT_S)
    assert [point.num_waiting for point in told.points()] == [1, 1, 1, 1]
    assert [point.start_ms for point in told.points()] == [0, 2000, 4000, 6000]
    told.wait_s(1000 * _POINT_S)
    points = told.points()
    assert len(points) == NUM_POINTS
    assert points[-1].start_ms == 1003 * 2000


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    told = ToldHistory()
    told.submit(1, 2, 3)
    told.begin(2, 3)
    told.deliver(3)
    for key in (1, 2, 3):
        told.end(key)
    assert told.history.num_unanswered == 0
    told.wait_s(_POINT_S)
    told.submit(4)
    told.wait_s(_POINT_S)
    assert [point.num_waiting for point in told.points()] == [3, 1]


@pytest.mark.parametrize("count", [1, 2, 100, 1000])
def test_quantiles_are_right_to_two_and_a_half_percent(count: int) -> None:
    durations, told = Durations(), live.LiveLatency()
    for each in range(1, count + 1):
        durations.add(each * _MS)
    durations.fill(told)
    assert told.count == count
    assert told.p50_us == pytest.approx(1000 * -(-count // 2), rel=0.026)
    assert told.p99_us == pytest.approx(1000 * -(-99 * count // 100), rel=0.026)
