"""Block tables on a device are those of the host, whatever became of rows, steps and copies."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from executor_service.device import HostStreams, ResidentRows, ResidentTables, Uploads
from executor_service.steps import BlockTables

NUM_ROWS = 4
# Of the device; rows may have more, which nobody reads.
MAX_NUM_BLOCKS = 40
DEVICE = torch.device("cpu")
# -1: behind a window.
BLOCKS = st.lists(st.integers(-1, 99), min_size=1, max_size=30)


class _Broken(RuntimeError):
    pass


class _Streams(HostStreams):
    """Of a device with memory of its own. `fails`: all copies, before or after they are made."""

    def __init__(self) -> None:
        self.fails = ""
        self.sent: list[int] = []

    @property
    def shares_memory(self) -> bool:
        return False

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        if self.fails == "before":
            raise _Broken
        super().copy_to_device(source, target)
        self.sent.append(len(source))
        if self.fails == "after":
            raise _Broken


@dataclass(slots=True)
class _Host:
    """The tables of an executor, and what they should be."""

    tables: BlockTables = field(default_factory=lambda: BlockTables(NUM_ROWS))
    expected: dict[int, list[int]] = field(default_factory=dict)

    def write(self, row_id: int, start: int, blocks: list[int]) -> None:
        columns = (np.array(c, np.int32) for c in ([row_id], [start], [0, len(blocks)], blocks))
        self.tables.write(*columns)
        table = self.expected.setdefault(row_id, [])
        table[start : start + len(blocks)] = blocks


class Tables(RuleBasedStateMachine):
    """Rows come, grow and go; a step looks, or fails in the middle of looking, now and then."""

    @initialize()
    def begin(self) -> None:
        self.host = _Host()
        self.streams = _Streams()
        self.device = ResidentTables(MAX_NUM_BLOCKS, DEVICE, Uploads(DEVICE, self.streams))

    @rule(row_id=st.integers(0, NUM_ROWS - 1), blocks=BLOCKS)
    def add(self, row_id: int, blocks: list[int]) -> None:
        """In place of what is there, if something is."""
        self.remove_rows([row_id])
        self.host.write(row_id, 0, blocks)

    @precondition(lambda self: self.host.expected)
    @rule(data=st.data(), blocks=BLOCKS)
    def write(self, data: st.DataObject, blocks: list[int]) -> None:
        row_id = data.draw(st.sampled_from(sorted(self.host.expected)))
        start = data.draw(st.integers(0, len(self.host.expected[row_id])))
        self.host.write(row_id, start, blocks)

    @precondition(lambda self: self.host.expected)
    @rule(data=st.data())
    def write_often(self, data: st.DataObject) -> None:
        """More often than is remembered."""
        row_id = data.draw(st.sampled_from(sorted(self.host.expected)))
        for number in range(70):
            self.host.write(row_id, 0, [number])

    @rule(row_ids=st.sets(st.integers(0, NUM_ROWS - 1)))
    def remove(self, row_ids: set[int]) -> None:
        self.remove_rows(sorted(row_ids))

    def remove_rows(self, row_ids: list[int]) -> None:
        self.host.tables.remove(np.array(row_ids, np.int32))
        for row_id in row_ids:
            self.host.expected.pop(row_id, None)

    @rule()
    def begin_anew(self) -> None:
        """Another executor on the same runner."""
        self.host = _Host()

    @rule(fails=st.sampled_from(("before", "after")))
    def fail(self, fails: str) -> None:
        self.streams.fails = fails
        with suppress(_Broken):
            self.device.follow(self.host.tables)
        self.streams.fails = ""

    @rule()
    def look(self) -> None:
        memory = self.device.follow(self.host.tables)
        for row_id, table in self.host.expected.items():
            read = table[:MAX_NUM_BLOCKS]
            assert memory[row_id, : len(read)].tolist() == read
        added = ResidentRows(memory, np.empty(0, np.int64))
        ids = torch.tensor([added.empty_row_id])
        assert not added.gather(ids, MAX_NUM_BLOCKS).any()

    @invariant()
    def host_is_right(self) -> None:
        for row_id in range(NUM_ROWS):
            table = self.host.tables.of_row(row_id)
            assert table.tolist() == self.host.expected.get(row_id, [])


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "30")),
    stateful_step_count=30,
    deadline=None,
)


def test_device_is_sent_only_what_is_new_when_a_table_grows() -> None:
    host, streams = _Host(), _Streams()
    device = ResidentTables(MAX_NUM_BLOCKS, DEVICE, Uploads(DEVICE, streams))
    host.write(1, 0, list(range(30)))
    device.follow(host.tables)
    host.write(1, 30, [7])
    device.follow(host.tables)
    device.follow(host.tables)
    # A place of 8 bytes and a block of 4, aligned.
    assert streams.sent == [30 * 8 + 30 * 4 + 8, 32]


def test_device_sees_what_was_there_when_tables_change_after_a_step_was_asked() -> None:
    host = _Host()
    device = ResidentTables(MAX_NUM_BLOCKS, DEVICE, Uploads(DEVICE, _Streams()))
    host.write(2, 0, [5, 6])
    rows = ResidentRows(device.follow(host.tables), np.array([2]))
    gathered = rows.gather(torch.tensor([2]), 2)
    host.write(2, 0, [8, 9])
    device.follow(host.tables)
    assert gathered.tolist() == [[5, 6]]
    out = torch.full((3, 4), -7, dtype=torch.int32)
    rows.gather(torch.tensor([2, rows.empty_row_id]), 3, out=out[:2, :3])
    assert out.tolist() == [[8, 9, 0, -7], [0, 0, 0, -7], [-7] * 4]
