"""One entry for each call of a core: what was asked, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from scheduler_service.journal.decisions import describe_error
from splitserve.scheduler.v1 import journal_pb2 as journal
from splitserve_rpc.domain_error import DomainError

_Result = TypeVar("_Result")


class Recorder(Protocol):
    """Takes the entries of recorded cores."""

    @property
    def is_recording(self) -> bool:
        """Whether entries are wanted."""

    @property
    def position(self) -> str:
        """Where the latest event is, for people."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Runs a part of the recording; whatever it raises ends the recording, and nothing else."""

    def append(self, entry: journal.JournalEntry) -> None:
        """Writes the entry of an event whose effect the cores have; part of an `attempt`."""

    def flush(self) -> None:
        """Nothing may come for a while."""

    def forget(self, number: int) -> None:
        """No event of this core comes after the next one."""


class CallLog:
    """The calls of one core. `now_ns`: its clock, None before the first tick."""

    def __init__(self, number: int, recorder: Recorder) -> None:
        self._number = number
        self._recorder = recorder
        self.now_ns: int | None = None
        self._recorded_now_ns: int | None = None
        self._has_ended = False

    def end(self) -> None:
        """Records no further calls."""
        self._has_ended = True

    def record(
        self,
        ask: Callable[[journal.JournalEntry], None],
        call: Callable[[], _Result],
        answer: Callable[[journal.JournalEntry, _Result], None],
    ) -> _Result:
        """Does `call`. `ask` is run before it, as the call may change what it is given."""
        recorder = self._recorder
        if self._has_ended or not recorder.is_recording:
            return call()
        entry = journal.JournalEntry(core=self._number)
        if self.now_ns is not None and self.now_ns != self._recorded_now_ns:
            entry.now_ns = self._recorded_now_ns = self.now_ns
        recorder.attempt(lambda: ask(entry))
        try:
            result = call()
        except Exception as error:
            entry.raised = describe_error(error)
            recorder.attempt(lambda: recorder.append(entry))
            if not isinstance(error, DomainError):
                recorder.flush()
            raise

        def write() -> None:
            answer(entry, result)
            recorder.append(entry)

        recorder.attempt(write)
        return result
