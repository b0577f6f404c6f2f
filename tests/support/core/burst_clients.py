"""Clients of a cluster in this process: what they are to get, and what they got."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.callers.quotas import num_computed_outputs
from scheduler_service.scheduler.values.plan import TokenEvent
from scheduler_service.scheduler.values.request import (
    FinishReason,
    Int32Array,
    Request,
    ScoredToken,
)
from scheduler_service.scheduler.values.request import Sequence as CoreSequence
from scheduler_service.streams.outbox import Outbox


@dataclass(slots=True)
class CountedCharge:
    """What a request costs; how often it began, and how it ended. Implements `RequestCost`."""

    num_begun: int = 0
    num_outputs: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """See Charge."""
        self.num_begun += 1

    def end(self, request: Request) -> None:
        """See Charge."""
        assert self.num_begun == 1
        self.num_outputs.append(num_computed_outputs(request))

    def check(self, num_told: int) -> None:
        """It is over, and the client was told `num_told` tokens: these at least were charged."""
        assert self.num_begun == 1
        (num_outputs,) = self.num_outputs
        assert num_outputs >= num_told


@dataclass(slots=True)
class BurstClient:
    """The sink of one request: what it is to get, by sequence, and what it got."""

    expected: list[list[int]]
    tokens: list[list[int]]
    outbox: Outbox
    number: int = 0
    finished: Request | None = None
    num_endings: int = 0
    prompt_scores: list[int] = field(default_factory=list)
    charge: CountedCharge = field(default_factory=CountedCharge)
    is_gone: bool = False

    @property
    def stream(self) -> BurstClient:
        """Itself."""
        return self

    def plain_tokens(self, handles: Int32Array, token_ids: Int32Array) -> None:
        """See Stream."""
        self.tokens[0] += token_ids.tolist()

    def flush(self) -> None:
        """See Stream."""

    def token(self, event: TokenEvent) -> None:
        """See Sink."""
        self.tokens[event.sequence.index].append(event.token_id)

    def prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """See Sink."""
        self.prompt_scores += [score.position for score in scored]

    def finish_sequence(self, sequence: CoreSequence) -> None:
        """See Sink."""

    def finish(self, request: Request) -> None:
        """See Sink."""
        self.finished = request
        self.num_endings += 1

    def check(self, *, is_over: bool) -> None:
        """What it got is true, and all there is if it ended well."""
        assert self.num_endings <= 1
        if is_over:
            self.charge.check(sum(map(len, self.tokens)))
        reason = self.finished.finish_reason if self.finished is not None else None
        is_complete = is_over and reason not in (None, FinishReason.ERROR, FinishReason.ABORTED)
        for index, tokens in enumerate(self.tokens):
            expected = self.expected[index]
            assert tokens == expected[: len(tokens)]
            if is_complete:
                assert tokens == expected
