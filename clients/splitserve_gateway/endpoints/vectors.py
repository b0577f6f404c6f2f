"""Vectors of texts: `POST /v1/embeddings`, `/classify` and `/pooling`."""

from __future__ import annotations

import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_client import InvalidRequest
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import Json, listed_answer, with_notes
from splitserve_gateway.generation import (
    Serving,
    VectorInput,
    VectorRequest,
    answer_id,
    classifies,
    compute_vectors,
    embeds,
    encode_chat,
    encode_inputs,
    pooling_of,
    pools,
    tokenizer_of,
    vector_paths,
    vector_request,
)
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import (
    ChatFields,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
)
from splitserve_text import PoolingTask

router = APIRouter()

_TASKS = {None: None, "embed": PoolingTask.EMBEDDING, "classify": PoolingTask.SCORES}
_SUITABLE = {None: pools, PoolingTask.EMBEDDING: embeds, PoolingTask.SCORES: classifies}


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Returns the embedding of a text, or of each text of a batch."""
    gateway = gateway_of(request)
    async with gateway.reading(request, EmbeddingRequest) as body:
        asked = await _embedding_request(gateway, body, PoolingTask.EMBEDDING)
    found = await compute_vectors(asked)
    data = (
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
        for index, vector in enumerate(found.vectors)
    )
    head = vector_head("embd", asked, body.request_id)
    return with_notes(await listed_answer(head, "data", data, vector_usage(found.num_tokens)), body)


@router.post("/pooling")
async def create_pooling(request: Request) -> Response:
    """Returns the embedding, or the scores of a classifier, for each text or for a chat."""
    gateway = gateway_of(request)
    async with gateway.reading(request, PoolingRequest) as body:
        if (body.input is None) == (body.messages is None):
            raise invalid("one of input and messages is required", "input")
        asked = await _embedding_request(gateway, body, _TASKS[body.task])
    found = await compute_vectors(asked)
    data = (
        {"index": index, "object": "pooling", "data": _encoded(vector, body)}
        for index, vector in enumerate(found.vectors)
    )
    head = vector_head("pool", asked, body.request_id)
    return with_notes(await listed_answer(head, "data", data, vector_usage(found.num_tokens)), body)


@router.post("/classify")
@router.post("/v1/classify")
async def classify(request: Request) -> Response:
    """Returns the probability of each label of a classifier, for each text."""
    gateway = gateway_of(request)
    async with gateway.reading(request, ClassifyRequest) as body:
        serving = await gateway.choose(body.model, classifies)
        pooling = pooling_of(serving.served)
        _check_task(PoolingTask.SCORES, serving)
        texts = _by_path(body.input)
        inputs = await encode_inputs(
            serving, texts, body, add_special_tokens=body.add_special_tokens
        )
        asked = vector_request(serving, body, inputs, PoolingTask.SCORES)
    found = await compute_vectors(asked)
    data = (_classes(index, vector, pooling.labels) for index, vector in enumerate(found.vectors))
    head = vector_head("classify", asked, body.request_id)
    return with_notes(await listed_answer(head, "data", data, vector_usage(found.num_tokens)), body)


def _classes(index: int, scores: array[float], labels: tuple[str, ...]) -> Json:
    best = max(range(len(scores)), key=scores.__getitem__)
    return {
        "index": index,
        "label": labels[best],
        "probs": list(scores),
        "num_classes": len(scores),
    }


# -- Requests --------------------------------------------------------------------------------------


async def _embedding_request(
    gateway: Gateway, body: EmbeddingRequest | PoolingRequest, task: PoolingTask | None
) -> VectorRequest:
    """Returns the request for `body`. `task`: None for embeddings, if the model has any, or scores.

    Raises ApiError and SplitserveError.
    """
    serving = await gateway.choose(body.model, _SUITABLE[task])
    pooling = pooling_of(serving.served)
    if task is None:
        has_embeddings = embeds(serving.served.model)
        task = PoolingTask.EMBEDDING if has_embeddings else PoolingTask.SCORES
    _check_task(task, serving)
    most = pooling.embedding_size if task is PoolingTask.EMBEDDING else 0
    if body.dimensions is not None and body.dimensions > most:
        allowed = f"1 to {most}" if most else "null, as scores have no dimensions"
        raise invalid(f"dimensions is {body.dimensions}; allowed: {allowed}", "dimensions")
    raw = body.normalize is False
    inputs = await _inputs(serving, body)
    return vector_request(serving, body, inputs, task, body.dimensions or 0, raw=raw)


async def _inputs(serving: Serving, body: EmbeddingRequest | PoolingRequest) -> list[VectorInput]:
    if isinstance(body, PoolingRequest) and body.messages is not None:
        return [await _chat(serving, body)]
    texts = _by_path(body.input)
    if body.prompt_name is not None and not all(isinstance(text, str) for text in texts.values()):
        raise invalid("prompt_name cannot be combined with token ids", "prompt_name")
    return await encode_inputs(
        serving,
        texts,
        body,
        prompt=_prompt(serving, body.prompt_name),
        add_special_tokens=body.add_special_tokens,
    )


async def _chat(serving: Serving, body: PoolingRequest) -> VectorInput:
    if body.prompt_name is not None:
        raise invalid("prompt_name cannot be combined with messages", "prompt_name")
    chat = ChatFields.model_construct(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=False,
    )
    prompt = await encode_chat(chat, serving.served, None, body.truncate_prompt_tokens)
    return VectorInput("messages", array("i", prompt.token_ids))


def _prompt(serving: Serving, name: str | None) -> str:
    """Returns the model's prompt of this name, None for its default. Raises ApiError."""
    if name is None and serving.served.tokenizer is None:
        return ""
    try:
        return tokenizer_of(serving.served).vector_texts.prompt(name)
    except InvalidRequest as error:
        raise invalid(error.message, "prompt_name") from error


def _by_path(given: object) -> Mapping[str, str | list[int]]:
    """Returns the texts of `input` by their paths: a text, token ids, or a list of either."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        return {f"input.{index}": each for index, each in enumerate(given)}
    return {"input": given}  # type: ignore[dict-item]


def _check_task(task: PoolingTask, serving: Serving) -> None:
    """Raises ApiError if the model has no vectors of this kind."""
    model = serving.served.model
    if not _SUITABLE[task](model):
        what = "no embeddings" if task is PoolingTask.EMBEDDING else "no labels to score"
        message = f"the model {model.name!r} has {what}; allowed: {vector_paths(model)}"
        raise invalid(message, "model")


# -- Answers ---------------------------------------------------------------------------------------


def vector_head(prefix: str, asked: VectorRequest, own_id: str | None) -> Json:
    """Returns the fields that answers begin with."""
    return {
        "id": f"{prefix}-{answer_id(own_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.serving.model_name,
    }


def vector_usage(num_tokens: int) -> Json:
    """Returns the field `usage`, with which answers end."""
    return {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


def _encoded(vector: array[float], body: EmbeddingRequest | PoolingRequest) -> object:
    """Returns a vector in the encoding that `body` asks for."""
    if body.encoding_format == "float":
        return list(vector)
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b64encode(vector.tobytes()).decode()
