"""Tests the file of the audit log, and its documentation."""

from __future__ import annotations

import json
import logging
import re
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from scheduler_service.audit import (
    MAX_PEERS,
    AuditEvent,
    AuditUnusable,
    CallerRefused,
    EventFile,
    ExecutorLost,
    FileAudit,
    NoAudit,
    RequestEnded,
    RequestRefused,
    event_name,
    open_audit,
)
from tests.support.processes.patience import PATIENCE_S

ENDED = RequestEnded("acme", "r1", "stop", 12)
HOSTILE = 'x"}\n{"event": "forged"\x1b[2J\x7f\u2028\u202e\ud800'


@dataclass
class Clock:
    now_s: float = 1_800_000_000.25

    def __call__(self) -> float:
        return self.now_s


@dataclass
class HeldFile:
    """Writes nothing before it may; fails as often as it is to."""

    may_write: threading.Event = field(default_factory=threading.Event)
    num_failures: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def write(self, fields: Mapping[str, object]) -> None:
        self.may_write.wait(PATIENCE_S)
        if self.num_failures > 0:
            self.num_failures -= 1
            raise OSError(28, "No space left on device")
        self.events.append(dict(fields))

    def close(self) -> None:
        pass


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def refused(peer: str, reason: str = "CALLER_UNKNOWN") -> CallerRefused:
    return CallerRefused("/x.Y/Z", peer, reason)


def test_event_is_a_line_of_json_with_its_time_and_name(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = FileAudit(EventFile(path), Clock())

    audit.record(ENDED)
    audit.record(ExecutorLost("a:1", 7, 3))
    audit.close()

    assert lines_of(path) == [
        {
            "time": "2027-01-15T08:00:00.250+00:00",
            "event": "request_ended",
            "tenant": "acme",
            "request_id": "r1",
            "reason": "stop",
            "num_output_tokens": 12,
        },
        {
            "time": "2027-01-15T08:00:00.250+00:00",
            "event": "executor_lost",
            "address": "a:1",
            "executor_epoch": 7,
            "num_requests": 3,
        },
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_event_with_a_hostile_name_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = FileAudit(EventFile(path), Clock())

    audit.record(RequestEnded(HOSTILE, "r" * 100_000, "stop", 1))
    audit.close()

    text = path.read_text()
    assert text[:-1].isprintable()
    assert len(text) < 1000
    (event,) = lines_of(path)
    assert event["tenant"] == HOSTILE


def test_file_is_made_anew_when_it_was_moved(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit", tmp_path / "audit.1"
    path.write_text('{"number": 0}\n')
    path.chmod(0o644)

    file = EventFile(path)
    file.write({"number": 1})
    path.rename(moved)
    file.write({"number": 2})
    file.write({"number": 3})
    file.close()

    assert [line["number"] for line in lines_of(moved)] == [0, 1]
    assert [line["number"] for line in lines_of(path)] == [2, 3]
    assert {each.stat().st_mode & 0o777 for each in (path, moved)} == {0o600}


def test_events_are_counted_and_nobody_waits_when_the_file_is_slow() -> None:
    file = HeldFile()
    audit = FileAudit(file, Clock(), max_queued=8)
    for _ in range(100):
        audit.record(ENDED)

    file.may_write.set()
    audit.close()

    written = [event for event in file.events if event["event"] == "request_ended"]
    dropped = [event["num_events"] for event in file.events if event["event"] == "events_dropped"]
    assert 8 <= len(written) <= 9
    assert len(written) + sum(dropped) == 100


def test_loss_is_counted_and_said_once_when_the_disk_is_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = HeldFile(num_failures=3)
    file.may_write.set()
    audit = FileAudit(file, Clock())
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            audit.record(ENDED)
        audit.close()

    counts = [event.get("num_events", 1) for event in file.events]
    assert sum(counts) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "audit_not_written problem='No space left on device'"
    ]


def test_refusals_are_counted_by_peer_and_second() -> None:
    file, clock = HeldFile(), Clock()
    file.may_write.set()
    audit = FileAudit(file, clock)
    for port in range(1000):
        audit.record(refused(f"ipv4:10.0.0.1:{port}"))
    audit.record(refused("ipv6:[::1]:5", "CALLER_NOT_ALLOWED"))
    clock.now_s += 1
    audit.record(refused("ipv4:10.0.0.1:7"))
    audit.close()

    seen = [(each["peer"], each["reason"], each["num_times"]) for each in file.events]
    assert seen == [
        ("ipv4:10.0.0.1:0", "CALLER_UNKNOWN", 1),
        ("ipv6:[::1]:5", "CALLER_NOT_ALLOWED", 1),
        ("ipv4:10.0.0.1:0", "CALLER_UNKNOWN", 999),
        ("ipv4:10.0.0.1:7", "CALLER_UNKNOWN", 1),
    ]


def test_different_refusals_of_one_host_are_told_apart() -> None:
    file = HeldFile()
    file.may_write.set()
    audit = FileAudit(file, Clock())
    different = [
        CallerRefused("/a.B/C", "ipv4:10.0.0.1:1", "CALLER_UNKNOWN"),
        CallerRefused("/a.B/D", "ipv4:10.0.0.1:2", "CALLER_UNKNOWN"),
        CallerRefused("/a.B/C", "ipv4:10.0.0.1:3", "CALLER_NOT_ALLOWED", "key:a"),
        CallerRefused("/a.B/C", "ipv4:10.0.0.1:4", "CALLER_NOT_ALLOWED", "key:b"),
    ]
    for event in (*different, *different, *different):
        audit.record(event)
    audit.close()

    seen = [
        (each["method"], each["reason"], each["caller"], each["num_times"]) for each in file.events
    ]
    told = [(each.method, each.reason, each.caller) for each in different]
    assert seen == [(*each, 1) for each in told] + [(*each, 2) for each in told]


def test_refusals_of_many_addresses_are_few_lines() -> None:
    file = HeldFile()
    file.may_write.set()
    audit = FileAudit(file, Clock())
    num_peers = 4 * MAX_PEERS
    for number in range(num_peers):
        audit.record(refused(f"ipv6:[fd00::{number:x}]:1"))
    audit.close()

    assert len(file.events) <= MAX_PEERS + 2
    assert sum(event["num_times"] for event in file.events) == num_peers


def test_refused_requests_are_counted_by_caller_reason_and_limit() -> None:
    file, clock = HeldFile(), Clock()
    file.may_write.set()
    audit = FileAudit(file, clock)
    for number in range(1000):
        for why in (("QUOTA_EXCEEDED", "requests"), ("QUOTA_EXCEEDED", "tokens"), ("BAD", "")):
            audit.record(RequestRefused("key:a", "a", f"r{number}", *why))
    audit.record(RequestRefused("key:b", "b", "r", "BAD", ""))
    clock.now_s += 1
    audit.record(RequestRefused("key:a", "a", "r", "BAD", ""))
    audit.close()

    seen = [(each["caller"], each["limit"], each["num_times"]) for each in file.events]
    assert seen == [
        *(("key:a", limit, 1) for limit in ("requests", "tokens", "")),
        ("key:b", "", 1),
        *(("key:a", limit, 999) for limit in ("requests", "tokens", "")),
        ("key:a", "", 1),
    ]


def test_refused_requests_of_many_callers_are_few_lines() -> None:
    file = HeldFile()
    file.may_write.set()
    audit = FileAudit(file, Clock())
    num_callers = 4 * MAX_PEERS
    for number in range(num_callers):
        audit.record(RequestRefused(f"key:{number}", "a", "r", "BAD", ""))
    audit.record(refused("ipv4:10.0.0.1:7"))
    audit.close()

    assert "ipv4:10.0.0.1:7" in [event.get("peer") for event in file.events]
    requests = [event for event in file.events if event["event"] == "request_refused"]
    assert len(requests) <= MAX_PEERS + 2
    assert sum(event["num_times"] for event in requests) == num_callers


def test_flood_of_refusals_hides_no_other_event() -> None:
    file = HeldFile()
    audit = FileAudit(file, Clock(), max_queued=8)
    for port in range(1000):
        audit.record(refused(f"ipv4:10.0.0.1:{port}"))
    audit.record(ExecutorLost("a:1", 1, 3))
    file.may_write.set()
    audit.close()

    assert "executor_lost" in [event["event"] for event in file.events]


def test_audit_is_refused_when_its_file_is_unwritable(tmp_path: Path) -> None:
    path = tmp_path / "no" / "folder"

    with pytest.raises(AuditUnusable) as refusal:
        open_audit(str(path))
    assert str(refusal.value) == f"--audit-log {path}: No such file or directory"
    assert isinstance(open_audit(None), NoAudit)


def test_next_line_is_whole_after_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = EventFile(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="only part of the line"):
            file.write({"number": "a long line"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    file.write({"number": 2})
    file.close()

    assert path.read_text().split("\n")[1:] == ['{"number": 2}', ""]


ROOT = Path(__file__).parents[4]


def test_security_doc_lists_the_events_and_their_fields() -> None:
    document = (ROOT / "docs" / "security.md").read_text()
    table = document.partition("| event | when | fields")[2].partition("\n\n")[0]
    listed = dict[str, set[str]]()
    for row in table.splitlines()[2:]:
        events, _, named = row.strip("| ").split(" | ")
        for event in re.findall(r"`(\w+)`", events):
            listed[event] = set(re.findall(r"`(\w+)`", named))

    kinds = {event_name(kind): kind for kind in get_args(AuditEvent)}
    assert listed.keys() == kinds.keys()
    for name, kind in kinds.items():
        missing = {field.name for field in fields(kind)} - listed[name]
        assert not missing, name
