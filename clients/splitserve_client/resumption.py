"""What it takes to go on with a request after its stream broke: its tokens, and patience."""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_client.codec import decode_tokens, encode_sampling_params
from splitserve_client.errors import (
    DeadlineExceeded,
    Draining,
    ModelNotReady,
    QueueFull,
    RequestIdInUse,
    ServerUnreachable,
    SplitserveError,
)
from splitserve_client.types import Finish, FinishReason, SamplingParams, Tokens, Usage

# What a server may say while it, or its successor, comes up again.
_PASSING = (ServerUnreachable, Draining, ModelNotReady, QueueFull, RequestIdInUse)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses between attempts: growing by `factor` up to a maximum, with a jitter.

    `give_up_after_s` counts from the loss; any progress ends the count.
    """

    first_delay_s: float = 0.1
    factor: float = 2.0
    max_delay_s: float = 2.0
    give_up_after_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where time comes from; tests bring their own. `clock` gives monotonic seconds."""

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    jitter: Callable[[], float] = random.random


class Backoff:
    """The pauses of one request or session."""

    def __init__(self, policy: RetryPolicy, timing: Timing, deadline: float | None = None) -> None:
        self._policy = policy
        self._timing = timing
        self._deadline = deadline
        self._lost_at: float | None = None
        self._delay_s = policy.first_delay_s

    def reset(self) -> None:
        """Forgets the failures so far: there was progress."""
        self._lost_at = None
        self._delay_s = self._policy.first_delay_s

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, None without one. Raises DeadlineExceeded after it."""
        if self._deadline is None:
            return None
        remaining_s = self._deadline - self._timing.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline of the request has passed")
        return remaining_s

    async def pause(self, error: SplitserveError) -> None:
        """Waits before the next attempt. Raises `error` once patience is at its end."""
        now = self._timing.clock()
        if self._lost_at is None:
            self._lost_at = now
        delay_s = self._delay_s * (0.5 + 0.5 * self._timing.jitter())
        delay_s = max(delay_s, error.retry_delay_s or 0.0)
        if now + delay_s - self._lost_at > self._policy.give_up_after_s:
            raise error
        remaining_s = self.remaining_s()
        if remaining_s is not None:
            delay_s = min(delay_s, remaining_s)
        self._delay_s = min(self._delay_s * self._policy.factor, self._policy.max_delay_s)
        await self._timing.sleep(delay_s)


class ResumableRequest:
    """A request and what has come back so far.

    It draws the seed and the id that were not given, since a continuation needs the same seed and
    an abort the id.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        resume_token_ids: Sequence[int] = (),
    ) -> None:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        self.request_id = request_id or secrets.token_hex(16)
        self._prompt_token_ids = list(prompt_token_ids)
        self._params = encode_sampling_params(params)
        self._output_token_ids = list(resume_token_ids)
        self._num_prompt_logprobs = 0
        self._num_repeated_prompt_logprobs = 0
        self._was_lost = False

    def message(self) -> scheduler_pb2.GenerateRequest:
        """The request that brings what is still missing."""
        return scheduler_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_token_ids,
            resume_token_ids=self._output_token_ids,
            sampling_params=self._params,
        )

    def receive(self, chunk: scheduler_pb2.TokenChunk) -> Tokens | None:
        """Notes new tokens; None where nothing in the chunk is new."""
        tokens = decode_tokens(chunk)
        # A stream that broke before the first token starts over with the scores of the prompt.
        num_known = min(self._num_repeated_prompt_logprobs, len(tokens.prompt_logprobs))
        self._num_repeated_prompt_logprobs -= num_known
        if num_known:
            tokens = replace(tokens, prompt_logprobs=tokens.prompt_logprobs[num_known:])
        self._num_prompt_logprobs += len(tokens.prompt_logprobs)
        self._output_token_ids.extend(tokens.token_ids)
        return tokens if tokens.token_ids or tokens.prompt_logprobs else None

    def receive_token(self, token_id: int) -> Tokens:
        """Notes one plain token."""
        self._output_token_ids.append(token_id)
        return Tokens((token_id,))

    def may_go_on(self, error: SplitserveError) -> bool:
        """Whether to submit again after `error`; notes that the stream was lost."""
        is_resumption = self._was_lost or bool(self._output_token_ids)
        if not isinstance(error, _PASSING if is_resumption else ServerUnreachable):
            return False
        self.note_loss()
        return True

    def note_loss(self) -> None:
        """The stream broke."""
        self._was_lost = True
        if not self._output_token_ids:
            self._num_repeated_prompt_logprobs = self._num_prompt_logprobs

    def aborted(self) -> Finish:
        """The end of a request that was aborted while no server had it."""
        usage = Usage(len(self._prompt_token_ids), len(self._output_token_ids), 0, 0)
        return Finish(FinishReason.ABORTED, None, usage)
