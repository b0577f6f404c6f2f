"""Request to a scheduler that moves to another scheduler when the first is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from splitserve_client import (
    AdapterUnknown,
    Draining,
    ModelChanged,
    ModelNotReady,
    OutputUnknown,
    ServerUnreachable,
    SessionRequest,
    SplitserveError,
)
from splitserve_gateway.tracing import CallTrace, exchange_trace
from splitserve_gateway.upstreams.upstream import Upstream
from splitserve_text import (
    Finish,
    SamplingParams,
    SchedulingParams,
    Tokens,
    TraceContext,
)

# Replaces a passed deadline: servers accept only deadlines above 0.
_LEAST_DEADLINE_S = 0.001
_NO_TRACE = TraceContext()


@dataclass(slots=True)
class _Came:
    """Output received so far, from all schedulers that had the request."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    num_prompt_scores: int = 0


class UpstreamRequest:
    """Request to a scheduler; resumes at another scheduler if that one is lost.

    `model_digest`: digest of the model that the prompt was encoded for. `credential`: the caller's;
    empty if callers are not identified.
    """

    def __init__(
        self,
        upstream: Upstream,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        scheduling: SchedulingParams,
        model_digest: str,
        credential: str = "",
        request_id: str = "",
        encoder_token_ids: Sequence[int] = (),
        encoder_features: bytes = b"",
    ) -> None:
        """Prepares the request without submitting it.

        `request_id`: id of the request at schedulers; empty if they need none. `encoder_token_ids`:
        for a model with an encoder; `encoder_features`: for one whose encoder takes audio.
        """
        if params.seed is None and params.pooling is None:
            # A fixed seed keeps the same randomness at another scheduler.
            params = replace(params, seed=secrets.randbits(63))
        self._upstream = upstream
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._scheduling = scheduling
        self._model_digest = model_digest
        self._credential = credential
        self._request_id = request_id
        self._encoder_token_ids = encoder_token_ids
        self._encoder_features = encoder_features
        # Schedulers that do not have the output with which the request begins.
        self._lacking: set[Upstream] = set()
        self._num_tries = 0
        self._came = _Came()
        self._running: SessionRequest | None = None
        self._is_aborted = False
        self._trace = exchange_trace.get()

    def abort(self) -> None:
        """Aborts the request. `events` then end with the Finish, which has the usage."""
        self._is_aborted = True
        if self._running is not None:
            self._running.abort()

    async def events(self) -> AsyncGenerator[Tokens | Finish, None]:
        """Yields tokens as they come; the last event is a Finish. Closing the generator aborts.

        Raises SplitserveError: ModelChanged if another model is served by now, also at the
        scheduler that would resume the request; ServerUnreachable, Draining or ModelNotReady if no
        scheduler can go on with it, for example because the next one lacks the adapter;
        OutputUnknown if none has the kept output that the request resumes.
        """
        upstream = self._upstream
        began_s = asyncio.get_running_loop().time()
        while True:
            call = None if self._trace is None else self._trace.call(upstream.address)
            self._running = upstream.submit(
                self._prompt_token_ids,
                self._params,
                resume_token_ids=self._came.outputs,
                encoder_token_ids=self._encoder_token_ids,
                encoder_features=self._encoder_features,
                scheduling=self._scheduling_now(began_s),
                model_digest=self._model_digest,
                credential=self._credential,
                request_id=self._next_id(),
                trace_context=_NO_TRACE if call is None else call.context,
            )
            num_known_scores = self._came.num_prompt_scores
            try:
                async with aclosing(upstream.read(self._running)) as events:
                    async for event in events:
                        if isinstance(event, Tokens):
                            event, num_known_scores = self._noted(event, num_known_scores)
                        yield event
                _end(call, None)
                return
            except BaseException as error:
                _end(call, error)
                other = None
                if isinstance(error, SplitserveError):
                    other = await self._next(upstream, error, began_s)
                if other is None:
                    raise
                upstream = other

    async def _next(
        self, upstream: Upstream, error: SplitserveError, began_s: float
    ) -> Upstream | None:
        """Chooses the next scheduler after `error`; None if the request ends with it.

        Raises ServerUnreachable.
        """
        other = None
        match error:
            case ModelChanged():
                upstream.doubt(self._model_digest)
            case AdapterUnknown() if self._num_tries > 1:
                message = "the scheduler that resumes the request lacks its adapter"
                raise ServerUnreachable(message) from error
            case OutputUnknown():
                self._lacking.add(upstream)
                other = upstream.find_other(self._model_digest, self._lacking)
                other = other or self._begin_anew()
            case Draining():
                patience_s = self._scheduling_now(began_s).deadline_s
                other = await upstream.wait_other(self._model_digest, patience_s)
            case ServerUnreachable() | ModelNotReady():
                other = upstream.find_other(self._model_digest)
        return None if self._is_aborted else other

    def _next_id(self) -> str:
        """Returns a new id for each try.

        A lost scheduler that is back may still have the request under the old id.
        """
        self._num_tries += 1
        if not self._request_id or self._num_tries == 1:
            return self._request_id
        return f"{self._request_id}~{self._num_tries}"

    def _noted(self, tokens: Tokens, num_known_scores: int) -> tuple[Tokens, int]:
        """Returns `tokens` without already known prompt scores, and the number of repeats to come.

        A request that starts anew before its first token has its prompt scored again.
        """
        self._came.outputs.setdefault(tokens.index, []).extend(tokens.token_ids)
        num_repeated = min(num_known_scores, len(tokens.prompt_logprobs))
        if num_repeated:
            new = tokens.prompt_logprobs[num_repeated:]
            tokens = replace(tokens, prompt_logprobs=new)
        self._came.num_prompt_scores += len(tokens.prompt_logprobs)
        return tokens, num_known_scores - num_repeated

    def _begin_anew(self) -> Upstream | None:
        """Returns the first scheduler again if no output is missed that somebody has read."""
        kept = self._scheduling.kept_output
        if kept is None or any(kept.num_read_tokens):
            return None
        self._scheduling = replace(self._scheduling, kept_output=replace(kept, resumes=False))
        return self._upstream

    def _scheduling_now(self, began_s: float) -> SchedulingParams:
        """Returns the parameters with the remaining time, and without output that has come."""
        scheduling = self._scheduling
        kept = scheduling.kept_output
        if kept is not None and kept.resumes and self._came.outputs:
            scheduling = replace(scheduling, kept_output=replace(kept, resumes=False))
        if scheduling.deadline_s is None:
            return scheduling
        deadline_s = scheduling.deadline_s - (asyncio.get_running_loop().time() - began_s)
        return replace(scheduling, deadline_s=max(deadline_s, _LEAST_DEADLINE_S))


def _end(call: CallTrace | None, error: BaseException | None) -> None:
    if call is not None:
        call.end(error)
