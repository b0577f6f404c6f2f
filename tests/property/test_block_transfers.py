"""Swaps on a stream of their own: whatever touches a block in conflict is ordered, in any steps.

A model of a device with two streams: what is asked of one happens in that order, and nothing else
is ordered but by waits. Each access to a block then has a vector clock, and two accesses to one
block of which one writes must be ordered by theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.device import BlockTransfers, Timer
from executor_service.steps import BlockMoves, StepInput
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 4
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 7, 4
COMPUTE, SWAP, HOST = range(3)
Block = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """What an operation reads and writes; `time`: its place in `stream`, `after`: what it saw."""

    name: str
    reads: frozenset[Block]
    writes: frozenset[Block]
    stream: int
    time: int
    after: tuple[int, ...]

    def conflicts(self, earlier: Access) -> bool:
        return bool(self.writes & (earlier.reads | earlier.writes) or self.reads & earlier.writes)

    def is_after(self, earlier: Access) -> bool:
        return self.after[earlier.stream] >= earlier.time


@dataclass(slots=True)
class FakeDevice:
    """The streams and the pools at once; keeps its accesses in the order they were asked for.

    `lost_waits`: methods that do nothing, to see that it would be noticed.
    """

    num_device_blocks: int = NUM_DEVICE_BLOCKS
    lost_waits: frozenset[str] = frozenset()
    accesses: list[Access] = field(default_factory=list)
    # Of each stream and of the host: what has happened before what it is asked next.
    clocks: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(3)])
    stream: int = COMPUTE

    def access(self, name: str, reads: set[Block], writes: set[Block]) -> None:
        clock = self.clocks[self.stream]
        self._join(self.stream, HOST)
        after = tuple(clock)
        clock[self.stream] += 1
        self.accesses.append(
            Access(
                name, frozenset(reads), frozenset(writes), self.stream, clock[self.stream], after
            )
        )

    def races(self) -> list[tuple[str, str]]:
        return [
            (earlier.name, later.name)
            for number, later in enumerate(self.accesses)
            for earlier in self.accesses[:number]
            if later.conflicts(earlier) and not later.is_after(earlier)
        ]

    # -- the streams -----------------------------------------------------------------------------

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        self.stream = SWAP
        yield
        self.stream = COMPUTE

    def swap_after_compute(self) -> None:
        self._wait("swap_after_compute", SWAP, COMPUTE)

    def compute_after_swap(self) -> None:
        self._wait("compute_after_swap", COMPUTE, SWAP)

    def start_timer(self) -> FakeTimer:
        return FakeTimer(self)

    def wait_on_host(self, clock: list[int]) -> None:
        self.clocks[HOST] = [max(pair) for pair in zip(self.clocks[HOST], clock, strict=True)]

    def _wait(self, name: str, stream: int, other: int) -> None:
        assert self.stream == COMPUTE
        if name not in self.lost_waits:
            self._join(stream, other)

    def _join(self, stream: int, other: int) -> None:
        pairs = zip(self.clocks[stream], self.clocks[other], strict=True)
        self.clocks[stream][:] = [max(pair) for pair in pairs]

    # -- the pools -------------------------------------------------------------------------------

    def swap_out(self, moves: BlockMoves) -> None:
        self._move("swap_out", moves, "device", "host")

    def swap_in(self, moves: BlockMoves) -> None:
        self._move("swap_in", moves, "host", "device")

    def copy(self, moves: BlockMoves) -> None:
        self._move("copy", moves, "device", "device")

    def _move(self, name: str, moves: BlockMoves, source: str, target: str) -> None:
        reads = {(source, block) for block in moves.sources.tolist()}
        self.access(name, reads, {(target, block) for block in moves.destinations.tolist()})


@dataclass(slots=True, eq=False)
class FakeTimer:
    device: FakeDevice
    end: list[int] | None = None

    def stop(self) -> None:
        self.end = list(self.device.clocks[self.device.stream])

    def elapsed_us(self) -> int:
        assert self.end is not None
        self.device.wait_on_host(self.end)
        return 1


def _compute(device: FakeDevice, step: StepInput) -> None:
    """What the model does: it writes the blocks of new tokens, it reads all of each row."""
    reads: set[Block] = set()
    writes: set[Block] = set()
    for row in range(step.num_rows):
        table = [("device", block) for block in step.block_tables[row].tolist() if block >= 0]
        reads.update(table)
        computed = int(step.num_computed_tokens[row])
        end = computed + int(step.num_new_tokens[row])
        writes.update(table[computed // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
    if step.num_rows:
        device.access("compute", reads, writes)


NEVER = 99


def _run(device: FakeDevice, steps: list[StepInput], lags: list[int]) -> None:
    """Finishes each step when as many more have begun; NEVER: it breaks off."""
    fake: Any = device
    transfers = BlockTransfers(fake, fake)
    unfinished: deque[tuple[int, list[Timer]]] = deque()
    for number, (step, lag) in enumerate(zip(steps, lags, strict=True)):
        timers = transfers.begin(step)
        _compute(device, step)
        if lag != NEVER:
            unfinished.append((number + lag, timers))
        while unfinished and unfinished[0][0] <= number:
            transfers.finish(unfinished.popleft()[1])


def _moves(*pairs: tuple[int, int]) -> BlockMoves:
    columns = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return BlockMoves(columns[:, 0].copy(), columns[:, 1].copy())


@st.composite
def _some_moves(draw: st.DrawFn, num_sources: int, num_targets: int, disjoint: bool) -> BlockMoves:
    targets = draw(st.lists(st.integers(0, num_targets - 1), unique=True, max_size=3))
    allowed = [block for block in range(num_sources) if not (disjoint and block in targets)]
    return _moves(*((draw(st.sampled_from(allowed)), target) for target in targets))


@st.composite
def _some_row(draw: st.DrawFn) -> Row:
    blocks = st.lists(st.integers(0, NUM_DEVICE_BLOCKS - 1), unique=True, min_size=1, max_size=3)
    table = draw(blocks)
    end = draw(st.integers(1, len(table) * BLOCK_SIZE))
    num_computed = draw(st.integers(0, end - 1))
    return Row([0] * (end - num_computed), num_computed, table, end)


_STEPS = st.builds(
    make_step,
    st.lists(_some_row(), max_size=2),
    _some_moves(NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, disjoint=False),
    _some_moves(NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS, disjoint=False),
    _some_moves(NUM_DEVICE_BLOCKS, NUM_DEVICE_BLOCKS, disjoint=True),
)


@given(st.lists(st.tuples(_STEPS, st.sampled_from([0, 1, 2, NEVER])), min_size=1, max_size=6))
def test_accesses_to_a_block_are_ordered_when_one_of_them_writes(
    steps: list[tuple[StepInput, int]],
) -> None:
    device = FakeDevice()
    _run(device, [step for step, _ in steps], [lag for _, lag in steps])
    assert device.races() == []


def _row(*table: int) -> Row:
    return Row([0], 0, table, 1)


def _encoder_row(*cross_blocks: int) -> Row:
    return Row([0], 0, (1,), 1, cross_blocks=cross_blocks, encoder=[0])


SWAPS = [
    make_step([_row(0)]),
    make_step([_row(0)], swap_out=_moves((0, 0))),
    make_step([_row(1)], swap_in=_moves((0, 1))),
]


@pytest.mark.parametrize("wait", ["swap_after_compute", "compute_after_swap"])
def test_a_race_is_seen_when_a_wait_is_lost(wait: str) -> None:
    device = FakeDevice(lost_waits=frozenset([wait]))
    _run(device, SWAPS, [NEVER] * len(SWAPS))
    assert device.races()


def _is_beside(device: FakeDevice) -> bool:
    """Whether computing does not wait for the swap-out of the same step."""
    (swap_out,) = (access for access in device.accesses if access.name == "swap_out")
    compute = next(access for access in device.accesses if access.name == "compute")
    return not compute.is_after(swap_out)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (make_step([_row(1, 2)], swap_out=_moves((0, 0))), True),
        (make_step([_row(1, 0)], swap_out=_moves((0, 0))), False),
        (make_step([_encoder_row(0)], swap_out=_moves((0, 0))), False),
        (make_step([_row(1)], swap_out=_moves((0, 0)), copy=_moves((2, 0))), False),
        (make_step([_row(1)], swap_out=_moves((0, 0)), swap_in=_moves((1, 3))), False),
    ],
)
def test_computing_goes_on_beside_a_swap_out_when_it_leaves_its_blocks_alone(
    step: StepInput, expected: bool
) -> None:
    device = FakeDevice()
    _run(device, [step], [0])
    assert _is_beside(device) is expected


def test_computing_waits_for_nothing_when_a_swap_out_is_over() -> None:
    device = FakeDevice(lost_waits=frozenset(["compute_after_swap"]))
    swap_out = make_step([_row(1)], swap_out=_moves((0, 0)))
    _run(device, [swap_out, make_step([_row(0)])], [0, 0])
    # Who waited was the host, for the timings.
    assert device.races() == []
