"""The sampling fields of a request as the scheduler takes them."""

from __future__ import annotations

from splitserve_client import (
    BeamSearch,
    EarlyStopping,
    SamplingParams,
    SchedulingParams,
)
from splitserve_gateway.http.errors import invalid
from splitserve_gateway.schemas.sampling import SamplingFields
from splitserve_gateway.upstreams.upstream import Served


def sampling_params(
    body: SamplingFields,
    served: Served,
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How tokens are chosen; what `body` leaves open is the model's recommendation.

    Raises ApiError. Words are not in it: `bad_words` and stop strings are texts.
    """
    beam = beam_search(body)
    params = SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        n=body.n,
        best_of=body.best_of,
        beam_search=beam,
        allowed_token_ids=_allowed(body),
    )
    return params.with_defaults(served.model.default_sampling_params)


def _allowed(body: SamplingFields) -> tuple[int, ...] | None:
    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids is empty; allowed: 1 or more", "allowed_token_ids")
    return tuple(body.allowed_token_ids) if body.allowed_token_ids is not None else None


def beam_search(body: SamplingFields) -> BeamSearch | None:
    """The beam search that `body` asks for, as wide as its `n`. Raises ApiError."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0) or body.early_stopping:
            param = "early_stopping" if body.early_stopping else "length_penalty"
            raise invalid(f"{param} is for use_beam_search only", param)
        return None
    stopping = EarlyStopping.ALWAYS if body.early_stopping else EarlyStopping.HEURISTIC
    return BeamSearch(body.n or 1, body.length_penalty, stopping)


def scheduling_params(body: SamplingFields) -> SchedulingParams:
    """What `body` asks of the scheduler itself."""
    return SchedulingParams(
        priority=body.priority or 0,
        tenant=body.user or "",
        deadline_s=body.deadline_s,
        cache_salt=body.cache_salt or "",
        num_public_prefix_tokens=body.num_public_prefix_tokens or 0,
    )
