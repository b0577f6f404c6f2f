"""A scheduler that was written down and read back goes on exactly as the one it was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.journal import Entries, Recording, decode_event, dump_state, load_state
from scheduler_service.scheduler import Effect, Event, Scheduler
from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import FleetConfig, PreemptionMode, Speculation
from scheduler_service.step_codec import EncodedBatch, ReceivedResult
from splitserve.scheduler.v1 import journal_pb2 as pb
from tests.support.core.recorded_run import RandomRun, run_config

# Events between two moments at which a scheduler is restored.
_MOST_EVENTS = 40


class Twin:
    """Compares a scheduler with a copy, which is restored from it now and then.

    Implements `Journal` and `Recording`. The copy is passed what the journal has of each event.
    """

    position = ""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._entries = Entries()
        self._entry = pb.JournalEntry()
        self.num_restored = 0

    def begin(self, scheduler: Scheduler, config: FleetConfig) -> None:
        self._scheduler = scheduler
        self._restore()

    def record(self, event: Event, now_ns: int, received: ReceivedResult | None) -> Recording:
        self._entry = self._entries.begin(event, now_ns, received)
        self._expected = decode_event(self._entry)
        return self

    def done(self, found: Sequence[Effect], batches: Sequence[EncodedBatch]) -> None:
        copied = pb.JournalEntry()
        copied.CopyFrom(self._entry)
        effects = self._copy.handle(self._expected, self._entry.now_ns)
        Entries(self._entries.executors.values()).complete(copied, effects)
        self._entries.complete(self._entry, found, batches)
        assert copied == self._entry
        self._num_events_left -= 1
        if self._num_events_left <= 0:
            self._restore()

    def raised(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        pass

    def _restore(self) -> None:
        self.num_restored += 1
        self._copy = load_state(dump_state(self._scheduler), Scheduler)
        self._num_events_left = self._random.randint(1, _MOST_EVENTS)


@settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "6")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    num_turns=st.integers(1, 100),
    num_executors=st.integers(1, 4),
    options=st.fixed_dictionaries(
        {
            "queue_policy": st.sampled_from(list(QUEUE_POLICIES)),
            "preemption_mode": st.sampled_from(PreemptionMode),
            "sliding_window": st.sampled_from([None, 13]),
            "num_host_blocks": st.sampled_from([0, 16]),
            "max_run_ahead": st.sampled_from([1, 4]),
            "speculation": st.sampled_from(Speculation),
            "tenant_weights": st.sampled_from([{}, {"a": 2.0, "b": 0.3}]),
        }
    ),
)
def test_scheduler_goes_on_identically_when_it_was_restored(
    seed: int, num_turns: int, num_executors: int, options: dict[str, object]
) -> None:
    twin = Twin(seed)
    run = RandomRun(twin, run_config(**options), seed, num_executors=num_executors)

    run.run(num_turns)

    assert not run.scheduler.locations
    assert twin.num_restored > 0
