"""Tests checkpoints of a scheduler: what is restored, and what a stranger may write."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_service.journal import (
    JOURNAL_VERSION,
    CheckpointUnusable,
    JournalUnreadable,
    checkpoint,
    class_structures,
    dump_state,
    load_state,
    replay,
    scheduler_structure,
)
from scheduler_service.journal.__main__ import main
from scheduler_service.scheduler import Scheduler
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.queue import QUEUE_POLICIES, WaitingQueue, make_queue_policy
from scheduler_service.scheduler.values import BatchPolicyName, BeamParams, BeamSearch, FleetConfig
from splitserve.scheduler.v1 import journal_pb2 as pb
from tests.support.core.driver import CoreDriver, make_config
from tests.support.core.recorded_run import write_entries


def test_checkpoint_is_small_when_rows_are_short_and_may_become_long() -> None:
    driver = CoreDriver(max_model_len=100_000, num_device_blocks=30_000, max_num_seqs=8)
    driver.add(10)
    driver.step()
    rows = driver.core.placement.rows
    assert rows.token_ids.nbytes + rows.block_tables.nbytes > 3_000_000

    data = dump_state(vars(driver.core))

    # Two numbers for each block, and little else.
    assert len(data) < 200_000
    copy = load_state(data, dict)["placement"].rows
    assert copy.token_ids.shape == rows.token_ids.shape
    assert copy.block_tables.shape == rows.block_tables.shape
    row_id = rows.order[0]
    assert copy.known_tokens(row_id).tolist() == rows.known_tokens(row_id).tolist()
    assert copy.block_table(row_id).tolist() == rows.block_table(row_id).tolist()


def test_beam_search_is_restored_when_its_beams_are_long() -> None:
    driver = CoreDriver()
    request = driver.add(4)
    search = BeamSearch(BeamParams(2), n=1, max_tokens=6000)
    for step in range(5000):
        search.advance([[(step % 90, -0.1), (step % 90 + 1, -0.2)]] * len(search.state.live))
    request.search = search

    (restored,) = driver.core.restored().evacuate()

    assert restored.search is not None
    assert restored.search.state == search.state


def an_engine(queue_policy: str = "fcfs", **config: object) -> Engine:
    return Engine(make_config(**config), WaitingQueue(make_queue_policy(queue_policy, {})))


def test_prefix_cache_evicts_to_the_host_when_the_engine_was_restored() -> None:
    engine = an_engine(num_host_blocks=4)
    blocks = load_state(dump_state(engine), Engine).placement.blocks
    evicted = blocks.device.allocate(1)
    blocks.device.publish(evicted[0], b"contents")
    blocks.device.free(evicted)

    blocks.device.allocate(blocks.device.num_free)

    assert blocks.draft.moves.swap_out == [(evicted[0], blocks.host.find(b"contents"))]


def test_all_queue_and_batch_policies_are_restored_when_nothing_has_happened() -> None:
    for queue in QUEUE_POLICIES:
        for batch in BatchPolicyName:
            engine = an_engine(queue_policy=queue, batch_policy=batch)
            assert load_state(dump_state(engine), Engine).num_waiting == 0


# -- what a stranger may write -----------------------------------------------------------------


class Calls:
    """Pickles as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls something by its name, which may have dots."""
    parts = [pickle.PROTO, b"\x04"]
    for text in (module, name):
        parts += [pickle.SHORT_BINUNICODE, bytes([len(text)]), text.encode()]
    parts += [pickle.STACK_GLOBAL, pickle.MARK]
    for text in arguments:
        parts += [pickle.SHORT_BINUNICODE, bytes([len(text)]), text.encode()]
    return b"".join([*parts, pickle.TUPLE, pickle.REDUCE, pickle.STOP])


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Calls(os.system, "true")),
        pickle.dumps(Calls(eval, "1")),
        pickle.dumps(Calls(getattr, "", "join")),
        pickle.dumps(Calls(np.load, "x")),
        pickle.dumps(Calls(io.open, "x")),
        pickle.dumps(pickle.loads),
        pickle.dumps(type("x", (), {}).__class__),
        by_name("posix", "system", "true"),
        by_name("scheduler_service.scheduler.engine.placement", "np.save", "x"),
        by_name("scheduler_service.scheduler.engine.placement", "np"),
        by_name("scheduler_service.scheduler.engine.placement", "attrgetter", "__class__"),
        by_name("scheduler_service.scheduler.values.request", "array", "i"),
        by_name("scheduler_service.scheduler.nothing", "x"),
        by_name("scheduler_service.executors.executor_session", "Lives"),
        by_name("scheduler_service.driver", "Driver"),
        by_name("scheduler_service.scheduler", "os"),
        by_name("scheduler_service.scheduler.values.admission", "dataclass"),
        by_name("scheduler_service.scheduler_of_others", "x"),
        by_name("scheduler_service.journal.checkpoint", "importlib.import_module", "os"),
        by_name("scheduler_service.journal.checkpoint", "dump_state", "x"),
        by_name("builtins", "__import__", "os"),
        by_name("copyreg", "_reconstructor", "x"),
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"Pname\n.",
        b"\x80\x04\x82\x01.",
        b"",
        b"\x80\x05K\x01.",
        pickle.dumps({"no": "core"}),
    ],
)
def test_load_refuses_bytes_that_are_no_scheduler(data: bytes) -> None:
    with pytest.raises(CheckpointUnusable):
        load_state(data, Scheduler)


def test_load_runs_nothing_when_a_pickle_calls_something(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for data in (
        pickle.dumps(Calls(os.mkdir, str(witness))),
        by_name("posix", "mkdir", str(witness)),
        by_name(
            "scheduler_service.scheduler.engine.placement", "np.lib.format.os.mkdir", str(witness)
        ),
    ):
        with pytest.raises(CheckpointUnusable, match="is not allowed"):
            load_state(data, Scheduler)

    assert not witness.exists()


@pytest.mark.parametrize("dtype", ["|O", "<U4", "|V8", "<M8[ns]"])
def test_array_is_refused_when_it_is_not_one_of_numbers(dtype: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        checkpoint.restore_array(dtype, (1,), b"\0" * 16)


@pytest.mark.parametrize("part", [np.array([object()]), len, lambda: None, [].append])
def test_dump_refuses_scheduler_when_it_has_what_cannot_be_restored(part: object) -> None:
    scheduler = Scheduler(FleetConfig())
    scheduler.part = part  # type: ignore[attr-defined]

    with pytest.raises((pickle.PicklingError, AttributeError, CheckpointUnusable)):
        load_state(dump_state(scheduler), Scheduler)


@pytest.mark.parametrize("name", ["__reduce__", "__class__", "locations", "nothing"])
def test_method_is_refused_when_no_pure_class_defines_it(name: str) -> None:
    scheduler = Scheduler(FleetConfig())

    with pytest.raises(ValueError, match=f"method {name} of Scheduler"):
        checkpoint.restore_method(scheduler, name)


def test_method_is_refused_when_its_object_is_of_no_pure_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method unlink of PosixPath"):
        checkpoint.restore_method(tmp_path, "unlink")


def test_replay_refuses_file_when_its_checkpoint_is_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.journal"
    write_checkpoint(path, b"cos\nsystem\n.", scheduler_structure())

    with pytest.raises(JournalUnreadable, match=r"version 0.0.9.*os.system is not allowed"):
        replay(path)


# -- a scheduler of another build --------------------------------------------------------------


def write_checkpoint(path: Path, scheduler: bytes, structure: str) -> None:
    header = pb.JournalHeader(journal_version=JOURNAL_VERSION, software_version="0.0.9")
    state = pb.SchedulerCheckpoint(scheduler=scheduler, structure=structure)
    entries = [
        pb.JournalEntry(header=header),
        pb.JournalEntry(scheduler_checkpoint=state),
        pb.JournalEntry(now_ns=1, tick=pb.Tick()),
    ]
    write_entries(path, entries)


def test_replay_refuses_a_checkpoint_of_another_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "older.journal"
    scheduler = Scheduler(FleetConfig())
    # What a build that had one attribute less wrote.
    del scheduler.locations
    write_checkpoint(path, dump_state(scheduler), "0123456789abcdef")

    assert main([str(path)]) == 2

    output = capsys.readouterr()
    assert "a checkpoint of another build" in output.err
    assert "0123456789abcdef" in output.err
    assert output.out == ""


def test_replay_accepts_a_checkpoint_of_the_same_structure(
    tmp_path: Path,
) -> None:
    path = tmp_path / "same.journal"
    write_checkpoint(path, dump_state(Scheduler(FleetConfig())), scheduler_structure())

    assert replay(path).difference is None


_CLASS = """
class Pool:
    size: int

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = deque()

    def take(self) -> None:
        self.num_taken = 1
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.free", "self.idle"),
        ("deque()", "dict()"),
        ("size: int\n", "size: float\n"),
        ("num_taken", "num_gone"),
        ("class Pool", "class BlockPool"),
    ],
)
def test_structure_changes_when_instances_consist_of_something_else(
    before: str, after: str
) -> None:
    changed = _CLASS.replace(before, after, 1)

    assert list(class_structures(changed)) != list(class_structures(_CLASS))


def test_structure_stays_when_only_a_decision_is_another() -> None:
    changed = _CLASS.replace("= 1", "= 2  # taken twice")

    assert list(class_structures(changed)) == list(class_structures(_CLASS))
