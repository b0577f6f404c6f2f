"""Entries of the journal: made while the scheduler runs, and made again by a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_service.core.plan import StepPlan
from scheduler_service.journal.effect_codec import describe_error, encode_effect
from scheduler_service.journal.event_codec import encode_event
from scheduler_service.scheduler import effects
from scheduler_service.scheduler.events import Event
from scheduler_service.step_codec import EncodedBatch, Received, encode_plan
from splitserve.scheduler.v1 import journal_pb2 as journal


class Entries:
    """Makes the entries of one scheduler.

    `executors`: those of the scheduler by address, with the epochs of their batches.
    """

    def __init__(self, executors: Iterable[journal.ExecutorIdentity] = ()) -> None:
        self.executors = {each.address: each for each in executors}

    def begin(
        self, event: Event, now_ns: int, received: Received | None = None
    ) -> journal.JournalEntry:
        """Returns the entry of an event that is about to be handled, without effects.

        `received`: the message that the outcome of a `StepCompleted` was decoded from.
        """
        entry = journal.JournalEntry(now_ns=now_ns)
        encode_event(event, received, entry)
        return entry

    def complete(
        self,
        entry: journal.JournalEntry,
        found: Sequence[effects.Effect],
        batches: Sequence[EncodedBatch] = (),
    ) -> None:
        """Adds the effects. `batches`: of the first steps among them; others are encoded here."""
        if entry.HasField("executor_joined"):
            joined = entry.executor_joined.identity
            self.executors[joined.address] = joined
        encoded = iter(batches)
        for effect in found:
            batch = b""
            if isinstance(effect, effects.SendStep):
                sent = next(encoded, None) or self._encode(effect.address, effect.plan)
                batch = sent.data
            encode_effect(effect, entry.effects.add(), batch)
            if isinstance(effect, effects.ExecutorGone):
                self._forget(effect)

    def fail(self, entry: journal.JournalEntry, error: Exception) -> None:
        """Says that the scheduler raised `error`, and returned no effects."""
        entry.raised = describe_error(error)

    def _encode(self, address: str, plan: StepPlan) -> EncodedBatch:
        identity = self.executors[address]
        return encode_plan(
            plan,
            scheduler_epoch=identity.scheduler_epoch,
            executor_epoch=identity.executor_epoch,
        )

    def _forget(self, gone: effects.ExecutorGone) -> None:
        known = self.executors.get(gone.address)
        # A new life may have joined at the address of the one that is gone.
        if known is not None and known.executor_epoch == gone.epoch:
            del self.executors[gone.address]
