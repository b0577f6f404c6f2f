"""Requests for vectors: tokens of texts and pairs, and their vectors from schedulers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from splitserve_gateway.generation.choices import COMPLETION_FIELDS, refusing, upstream_id
from splitserve_gateway.generation.prompts import (
    Serving,
    check_beginning,
    check_chars,
    run_off_loop,
    tokenizer_of,
    too_long,
)
from splitserve_gateway.generation.text_requests import scheduling_params
from splitserve_gateway.http import ApiError, invalid
from splitserve_gateway.schemas import VectorFields
from splitserve_gateway.upstreams import ServedByScheduler, UpstreamRequest
from splitserve_text import (
    Finish,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    SchedulingParams,
)

Encodable = TypeVar("Encodable")

# Inputs of one request submitted at a time: enough for full batches, few for a scheduler's queue.
_MAX_INPUTS_AT_A_TIME = 256
# Bound on the tokens of all inputs of a request; they take 4 bytes each.
MAX_TOKENS = 2**24
# What is cut is searched for beyond the cut: the last tokens of a shortened text may differ.
_MORE_TOKENS = 64
# Fixed cost of one tokenizer call, in characters.
_CHARS_PER_CALL = 16


@dataclass(frozen=True, slots=True)
class VectorInput:
    """Tokens of one text or pair.

    `param`: path of the text in the body, for errors. `second_text_start`: as of `PoolingParams`.
    """

    param: str
    token_ids: array[int]
    second_text_start: int = 0


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """Complete input of a request for vectors. `own_id`: the caller's request id, if any."""

    serving: Serving
    inputs: Sequence[VectorInput]
    pooling: PoolingParams
    scheduling: SchedulingParams
    own_id: str | None


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors in the order of the inputs."""

    vectors: list[array[float]]
    num_tokens: int


def vector_request(
    serving: Serving,
    body: VectorFields,
    inputs: Sequence[VectorInput],
    task: PoolingTask,
    num_dimensions: int = 0,
    *,
    raw: bool = False,
) -> VectorRequest:
    """Returns the request for vectors of `inputs`. Other arguments: as of `PoolingParams`."""
    adapter = "" if serving.adapter is None else serving.adapter.name
    pooling = PoolingParams(task, num_dimensions, raw or body.use_activation is False)
    return VectorRequest(
        serving, inputs, pooling, scheduling_params(body, adapter), body.request_id
    )


async def compute_vectors(request: VectorRequest) -> Vectors:
    """Returns the vectors of all inputs. An error of one input ends the others.

    Cancelling the task aborts the request. Raises SplitserveError, and ApiError that names the
    input if the scheduler refuses it.
    """
    vectors: list[array[float]] = [array("f")] * len(request.inputs)
    num_tokens = 0
    remaining = iter(range(len(request.inputs)))

    async def work() -> None:
        nonlocal num_tokens
        for index in remaining:
            finish = await _compute(request, index)
            if finish.vector is None:
                # Not 500: OpenAI's clients retry that.
                message, kind = "an operator ended the request", "invalid_request_error"
                raise ApiError(422, kind, message, code="aborted")
            vectors[index] = finish.vector
            num_tokens += finish.usage.num_prompt_tokens

    num_workers = min(_MAX_INPUTS_AT_A_TIME, len(request.inputs))
    workers = [asyncio.create_task(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return Vectors(vectors, num_tokens)


async def _compute(request: VectorRequest, index: int) -> Finish:
    """Returns the end of one input's request. Raises ApiError and SplitserveError."""
    serving, each = request.serving, request.inputs[index]
    pooling = replace(request.pooling, second_text_start=each.second_text_start)
    params = SamplingParams(pooling=pooling)
    upstream_request = UpstreamRequest(
        serving.upstream,
        each.token_ids,
        params,
        request.scheduling,
        serving.served.model.digest,
        serving.caller.credential,
        upstream_id(request.own_id, index),
    )
    fields = {
        **COMPLETION_FIELDS,
        "prompt": each.param,
        "pooling.num_dimensions": "dimensions",
    }
    with refusing(serving.adapter, params, fields):
        async with aclosing(upstream_request.events()) as events:
            async for event in events:
                if isinstance(event, Finish):
                    return event
    raise AssertionError("the last event is a Finish")


# -- Tokens of inputs ------------------------------------------------------------------------------

Text = str | list[int]


async def encode_inputs(
    serving: Serving,
    texts: Mapping[str, Text],
    body: VectorFields,
    *,
    prompt: str = "",
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
) -> list[VectorInput]:
    """Returns the tokens of texts, or checks those that are given as token ids.

    `texts`: by their paths in the body. `prompt`: put in front of each text. `max_tokens`: bound on
    the tokens of each besides special ones; more are cut off. Raises ApiError and SplitserveError.
    """
    served = serving.served
    num_special = 0
    if add_special_tokens and any(isinstance(text, str) for text in texts.values()):
        num_special = serving.tokenizer.vector_texts.num_special_tokens()
    most = _most_tokens(body, served, num_special)
    if max_tokens is not None:
        own = max_tokens + num_special
        most = own if most is None else min(most, own)
    for param, text in texts.items():
        _check(text, param, most, served)

    def encode(param: str, text: Text) -> VectorInput:
        if not isinstance(text, str):
            return VectorInput(param, array("i", text[:most]))
        tokenizer = tokenizer_of(served)
        if most is None:
            check_beginning(text, param, served, tokenizer)
        token_ids = tokenizer.vector_texts.encode(
            prompt + text, max_tokens=most, add_special_tokens=add_special_tokens
        )
        return VectorInput(param, array("i", token_ids))

    size = sum(map(len, texts.values())) + (_CHARS_PER_CALL + len(prompt)) * len(texts)
    return await _encode_all(served, texts, encode, size)


async def encode_pairs(
    serving: Serving,
    pairs: Mapping[str, tuple[str, str]],
    body: VectorFields,
    max_second_tokens: int | None = None,
) -> list[VectorInput]:
    """Returns the tokens of pairs. `pairs`: by the paths of their second texts in the body.

    Raises ApiError and SplitserveError.
    """
    served = serving.served
    tokenizer = tokenizer_of(served)
    texts = tokenizer.vector_texts
    most = _most_tokens(body, served, texts.num_special_tokens(is_pair=True))
    firsts: dict[str, str] = {}

    def shortened(param: str, text: str) -> str:
        """Returns the beginning of a first text; computed once, as many pairs may share it."""
        if text not in firsts:
            if most is None:
                check_beginning(text, param, served, tokenizer)
            firsts[text] = text if most is None else texts.beginning(text, most + _MORE_TOKENS)
        return firsts[text]

    def encode(param: str, pair: tuple[str, str]) -> VectorInput:
        first, second = pair
        if most is None and max_second_tokens is None:
            check_beginning(second, param, served, tokenizer)
        found = texts.encode_pair(
            shortened(param, first),
            second,
            max_tokens=most,
            max_second_tokens=max_second_tokens,
        )
        return VectorInput(param, array("i", found.token_ids), found.second_text_start)

    size = sum(len(first) + len(second) + _CHARS_PER_CALL for first, second in pairs.values())
    return await _encode_all(served, pairs, encode, size)


async def _encode_all(
    served: ServedByScheduler,
    texts: Mapping[str, Encodable],
    encode: Callable[[str, Encodable], VectorInput],
    size: int,
) -> list[VectorInput]:
    """Encodes all `texts`. Raises ApiError for one without tokens, or with too many, and for all.

    `size`: number of characters or tokens.
    """

    def encode_all() -> list[VectorInput]:
        inputs: list[VectorInput] = []
        num_tokens = 0
        for param, text in texts.items():
            each = encode(param, text)
            _check_length(each, served)
            num_tokens += len(each.token_ids)
            if num_tokens > MAX_TOKENS:
                message = f"{param} and the texts before it have {num_tokens} tokens; allowed:"
                raise invalid(f"{message} at most {MAX_TOKENS} in a request", param)
            inputs.append(each)
        return inputs

    if served.tokenizer is None:
        return encode_all()
    return await run_off_loop(served.tokenizer, size, encode_all)


def _check(text: Text, param: str, most: int | None, served: ServedByScheduler) -> None:
    """Raises ApiError for a text that is empty or certainly too long, or for unknown token ids.

    `most`: number of tokens to which the text is cut; None for no cut.
    """
    if isinstance(text, str):
        tokenizer_of(served)
        check_text(text, param)
        check_chars(param, len(text), most, served)
    elif text and max(text) >= served.model.vocab_size:
        allowed = f"token ids below {served.model.vocab_size}"
        raise invalid(f"{param} has {max(text)}; allowed: {allowed}", param, "token_out_of_range")


def check_text(text: str, param: str) -> None:
    """Raises ApiError for an empty text."""
    if not text:
        raise invalid(f"{param} is empty; allowed: 1 character or more", param, "prompt_empty")


def _most_tokens(body: VectorFields, served: ServedByScheduler, num_special: int) -> int | None:
    """Returns to how many tokens inputs are cut; None for no cut. Raises ApiError."""
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    if most == -1:
        return served.model.max_model_len
    if most <= num_special:
        message = f"truncate_prompt_tokens is {most}; allowed: -1, or at least {num_special + 1}"
        raise invalid(message, "truncate_prompt_tokens")
    return most


def _check_length(each: VectorInput, served: ServedByScheduler) -> None:
    """Raises ApiError if an input has no tokens, or more than the model takes."""
    count = len(each.token_ids)
    if not count:
        raise invalid(f"{each.param} has no tokens; allowed: 1 or more", each.param, "prompt_empty")
    if count > served.model.max_model_len:
        raise too_long(f"{count} tokens", each.param, served)
