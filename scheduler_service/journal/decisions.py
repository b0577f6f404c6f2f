"""What came of a call of a core, as messages of the journal."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np

from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Int32Array, Request
from scheduler_service.journal.request_codec import encode_request
from splitserve.scheduler.v1 import journal_pb2 as journal
from splitserve_rpc.domain_error import DomainError


def describe_events(events: StepEvents) -> journal.CoreEvents:
    """What clients are to be told."""
    checksum = crc32(events.token_ids.data, crc32(events.client_keys.data))
    for event in events.tokens:
        request_id = event.sequence.request.request_id
        text = f"{request_id} {event.sequence.index} {event.token_id}"
        checksum = crc32(text.encode(), checksum)
    num_tokens = len(events.token_ids) + len(events.tokens)
    message = journal.CoreEvents(num_tokens=num_tokens, tokens_crc32=checksum)
    for _, scored in events.prompt_logprobs:
        message.num_prompt_logprobs += len(scored)
    for sequence in events.finished_sequences:
        message.finished_sequences.append(f"{sequence.request.request_id} {sequence.index}")
    for request in events.finished:
        message.finished.append(_describe_end(request))
    return message


def _describe_end(request: Request) -> journal.EndedRequest:
    assert request.finish_reason is not None
    checksum, num_tokens = 0, 0
    for tokens in _outputs(request):
        checksum = crc32(tokens.tobytes(), checksum)
        num_tokens += len(tokens)
    return journal.EndedRequest(
        request_id=request.request_id,
        finish_reason=request.finish_reason.value,
        error_reason="" if request.error is None else request.error[0],
        num_output_tokens=num_tokens,
        output_crc32=checksum,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )


def _outputs(request: Request) -> Iterable[Int32Array]:
    if request.completions:
        return [np.array(c.token_ids, np.int32) for c in request.completions]
    return [s.token_ids[s.num_prompt_tokens :] for s in request.sequences]


def describe_evacuated(requests: Iterable[Request]) -> journal.CoreEvacuate:
    """The requests that a core gave away at its end."""
    return journal.CoreEvacuate(requests=map(describe_given_away, requests))


def describe_given_away(request: Request) -> journal.EvacuatedRequest:
    """A request that a core gave away."""
    return journal.EvacuatedRequest(
        request_id=request.request_id,
        num_tokens=sum(len(sequence.token_ids) for sequence in request.sequences),
        error_reason="" if request.error is None else request.error[0],
        state_crc32=crc32(encode_request(request).SerializeToString(deterministic=True)),
    )


def describe_error(error: Exception) -> str:
    """What a call raised. Messages are left out: they may be reworded."""
    name = type(error).__name__
    return f"{name} {error.reason}" if isinstance(error, DomainError) else name
