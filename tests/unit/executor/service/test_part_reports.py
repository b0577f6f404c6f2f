"""Parts of results: which tokens they have, and when they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_service.service import LEAST_INTERVAL_S, Encode, PartReports
from executor_service.steps import StepIdentity, TokenRuns
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.steps.batches import read_i32


@dataclass(slots=True)
class _Reported:
    """Reports of step 9, the parts that they sent, and a clock that the test sets."""

    now_s: float = 100.0
    parts: list[pb.StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reports = PartReports(StepIdentity(7, 8, 9, None), self._send, lambda: self.now_s)

    reports: PartReports = field(init=False)

    def _send(self, encode: Encode) -> None:
        self.parts.append(encode())

    def report(self, *rows: list[int], after_s: float = LEAST_INTERVAL_S) -> None:
        self.now_s += after_s
        self.reports.report(TokenRuns.of(rows))

    @property
    def columns(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and offsets of each part."""
        return [
            (read_i32(part.sampled_token_ids), read_i32(part.sampled_offsets))
            for part in self.parts
        ]


def test_part_has_status_and_identity_of_its_step() -> None:
    reported = _Reported()
    reported.report([5])
    assert reported.parts == [
        pb.StepResult(
            scheduler_epoch=7,
            executor_epoch=8,
            step_id=9,
            status=pb.STEP_STATUS_PARTIAL,
            sampled_token_ids=bytes([5, 0, 0, 0]),
            sampled_offsets=bytes([0, 0, 0, 0, 1, 0, 0, 0]),
        )
    ]


def test_part_has_the_tokens_since_the_part_before() -> None:
    reported = _Reported()
    reported.report([5], [], [7])
    reported.report([5, 6], [], [7, 8, 9])
    reported.report([5, 6, 1], [2], [7, 8, 9])
    assert reported.columns == [
        ([5, 7], [0, 1, 1, 2]),
        ([6, 8, 9], [0, 1, 1, 3]),
        ([1, 2], [0, 1, 2, 2]),
    ]


def test_first_part_is_sent_at_once_and_later_ones_wait() -> None:
    reported = _Reported()
    reported.report([5], after_s=0)
    reported.report([5, 6], after_s=LEAST_INTERVAL_S / 2)
    assert reported.columns == [([5], [0, 1])]
    reported.report([5, 6, 7], after_s=LEAST_INTERVAL_S / 2 + 1e-9)
    assert reported.columns == [([5], [0, 1]), ([6, 7], [0, 2])]


def test_no_part_is_sent_when_there_is_no_new_token() -> None:
    reported = _Reported()
    reported.report([], [])
    reported.report([5], [])
    reported.report([5], [])
    assert reported.columns == [([5], [0, 1, 1])]
