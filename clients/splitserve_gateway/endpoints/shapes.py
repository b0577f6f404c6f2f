"""Parts of answers that several endpoints have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import Response

from splitserve_gateway.generation.choices import Totals
from splitserve_gateway.generation.request_ids import answer_id
from splitserve_gateway.schemas.base import ApiRequest, StreamOptions
from splitserve_gateway.schemas.sampling import SamplingFields
from splitserve_gateway.upstreams.upstream import Served

Json = dict[str, object]

_IGNORED_HEADER = "x-splitserve-ignored-fields"


def head(prefix: str, kind: str, body: SamplingFields, served: Served) -> Json:
    """What every answer, and every event of one, begins with."""
    return {
        "id": f"{prefix}-{answer_id(body.request_id)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.model.name,
        "system_fingerprint": f"fp_{served.model.digest[:12]}",
    }


def usage(totals: Totals) -> Json:
    """`usage`."""
    return {
        "prompt_tokens": totals.num_prompt_tokens,
        "completion_tokens": totals.num_output_tokens,
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.num_cached_tokens},
    }


class StreamUsage:
    """What `stream_options` asks to be told of token counts in a stream."""

    def __init__(self, options: StreamOptions | None, num_prompt_tokens: int) -> None:
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._is_wanted = options is not None and options.include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0

    def of_event(self, num_tokens: int) -> Json:
        """What an event that brings `num_tokens` has besides its choices."""
        self._num_output_tokens += num_tokens
        if self._is_continuous:
            return {"usage": usage(Totals(self._num_prompt_tokens, self._num_output_tokens))}
        return {"usage": None} if self._is_wanted else {}

    def last(self, totals: Totals) -> Json | None:
        """What the event after all choices has; None if there is to be none."""
        return {"choices": [], "usage": usage(totals)} if self._is_wanted else None


class WholeChoice(Protocol):
    """A choice, once all of it is there."""

    def whole(self) -> Json:
        """As JSON."""


async def whole_answer(start: Json, choices: Sequence[WholeChoice], more: Json) -> Response:
    """The answer with all its choices, and `more`, which is not empty.

    One choice after the other: they may have megabytes of logprobs.
    """
    pieces = [to_json(start)[:-1], b',"choices":[']
    for number, choice in enumerate(choices):
        pieces += [b"," if number else b"", to_json(choice.whole())]
        await asyncio.sleep(0)
    pieces += [b"],", to_json(more)[1:]]
    return Response(b"".join(pieces), media_type="application/json")


def with_notes(response: Response, body: ApiRequest) -> Response:
    """`response`, saying in a header which fields of `body` changed nothing."""
    if ignored := body.ignored:
        response.headers[_IGNORED_HEADER] = ", ".join(ignored)
    return response
