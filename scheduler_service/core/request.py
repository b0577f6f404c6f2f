"""Requests and sequences, and the states they go through."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is: WAITING -> RUNNING, back by preemption, and any -> FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"
    ERROR = "error"


NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens with its place in the KV cache.

    Invariants: `token_ids` holds every token known, prompt first. `block_table` and `row_id` are
    set exactly while RUNNING. `num_promised` tokens more are being sampled by steps in flight, the
    last of which is `last_step_id`; while RUNNING the row's columns say so instead.
    """

    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    row_id: int = NO_ROW
    num_promised: int = 0
    last_step_id: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it will never run again."""
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for. `arrival` orders requests: smaller is older, and more urgent.

    `stop_len` is the number of tokens at which its sequences end and `stop_token_ids` what else
    ends them; both are set when a core accepts it. `num_fruitless_losses` counts the steps and
    executors it lost since its last token.
    """

    request_id: str
    params: SamplingParams
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    stop_len: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_fruitless_losses: int = 0
    num_prompt_logprobs_sent: int = 0

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        *,
        arrival: int,
        seed: int,
        resume_token_ids: Tokens[int] = (),
    ) -> Request:
        """A waiting request with one sequence of `prompt_token_ids + resume_token_ids`."""
        request = cls(request_id, params, arrival)
        tokens = [*prompt_token_ids, *resume_token_ids]
        request.sequences.append(Sequence(request, tokens, len(prompt_token_ids), seed))
        if resume_token_ids:
            # Whoever has output tokens has the prompt logprobs, which come before them.
            request.num_prompt_logprobs_sent = len(prompt_token_ids) - 1
        return request

    @property
    def sequence(self) -> Sequence:
        """The only sequence."""
        return self.sequences[0]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def abort_unscheduled(self) -> None:
        """Ends a request that no scheduler has."""
        self.finish_reason = FinishReason.ABORTED
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED
