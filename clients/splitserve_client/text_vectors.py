"""Vectors of many texts over one session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypedDict

from splitserve_client.client_config import Backoff, ClientConfig
from splitserve_client.generation import Pooled, collect_vector
from splitserve_client.session import Session
from splitserve_client.text_map import PASSING
from splitserve_text import (
    InvalidRequest,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    SchedulingParams,
    Tokenizer,
)

# A request before it is submitted.
Input = tuple[Sequence[int], PoolingParams]

_MAX_RUNNING = 256


class VectorOptions(TypedDict, total=False):
    """Options of `embed` and `score`.

    `max_tokens`: longer texts are cut to it instead of being refused, and of a pair the longer text
    first. `max_running`: limit of running requests; 256 by default.
    """

    max_tokens: int | None
    max_running: int
    scheduling: SchedulingParams | None


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pooling: PoolingParams,
    prompt_name: str | None,
    max_tokens: int | None,
) -> list[Input]:
    """Returns the inputs for texts behind the model's prompt. Raises InvalidRequest."""
    prompt = tokenizer.vector_texts.prompt(prompt_name)
    encode = tokenizer.vector_texts.encode
    return [(encode(prompt + text, max_tokens=max_tokens), pooling) for text in texts]


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], max_tokens: int | None
) -> list[Input]:
    """Returns the inputs for pairs of texts. Raises InvalidRequest."""
    encode = tokenizer.vector_texts.encode_pair
    encoded = (encode(first, second, max_tokens=max_tokens) for first, second in pairs)
    task = PoolingTask.SCORES
    return [
        (pair.token_ids, PoolingParams(task, second_text_start=pair.second_text_start))
        for pair in encoded
    ]


async def pool_all(
    session: Session,
    inputs: Sequence[Input],
    model_digest: str,
    config: ClientConfig,
    options: VectorOptions,
) -> list[Pooled]:
    """Returns the vectors of `inputs`, in order. Enters `session`, and leaves it at the end.

    A full queue or a server that returns in time only causes a pause. Raises the first error of a
    request, and ValueError; the other requests are aborted then.
    """
    max_running = options.get("max_running", _MAX_RUNNING)
    if max_running < 1:
        raise ValueError(f"max_running is {max_running}; allowed: at least 1")
    found: dict[int, Pooled] = {}
    numbered = iter(enumerate(inputs))

    async def work() -> None:
        for index, (token_ids, pooling) in numbered:
            backoff = Backoff(config.retry, config.timing)
            while index not in found:
                request = session.submit(
                    token_ids,
                    SamplingParams(pooling=pooling),
                    scheduling=options.get("scheduling"),
                    model_digest=model_digest,
                )
                try:
                    found[index] = await collect_vector(request)
                except PASSING as error:
                    await backoff.pause(error)
                finally:
                    request.close()

    async with session:
        workers = [asyncio.create_task(work()) for _ in range(min(max_running, len(inputs)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(inputs))]


def only_score(pooled: Pooled) -> float:
    """Returns the score of a classifier with one label. Raises InvalidRequest for others."""
    if len(pooled.vector) != 1:
        message = f"the model returns {len(pooled.vector)} scores; allowed: models with one label"
        raise InvalidRequest(message)
    return pooled.vector[0]
