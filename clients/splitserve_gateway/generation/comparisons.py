"""Scores of pairs of texts: by a classifier with one label, or the cosine of two embeddings."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

from splitserve_gateway.generation.model_kinds import (
    embeds,
    pooling_of,
    scores_pairs,
    vector_paths,
)
from splitserve_gateway.generation.prompts import Serving
from splitserve_gateway.generation.vectors import (
    VectorRequest,
    check_text,
    compute_vectors,
    encode_inputs,
    encode_pairs,
    vector_request,
)
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import VectorFields
from splitserve_text import PoolingTask


@dataclass(frozen=True, slots=True)
class TextPairs:
    """First and second texts of pairs, by their paths in the body.

    There are equally many of both, or one first text that is compared with each second text.
    `is_search`: first texts are queries, second ones documents, and the model's prompts for them
    are used. `max_second_tokens`: bound on the tokens of a second text; None for none.
    """

    firsts: Mapping[str, str]
    seconds: Mapping[str, str]
    is_search: bool = False
    max_second_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Request for the scores of pairs.

    `num_firsts`: number of embeddings of first texts, which precede those of second texts; 0 if a
    classifier scores pairs.
    """

    request: VectorRequest
    num_firsts: int

    async def scores(self) -> tuple[list[float], int]:
        """Returns the scores in the order of the second texts, and the number of tokens.

        Raises ApiError and SplitserveError.
        """
        found = await compute_vectors(self.request)
        vectors = found.vectors
        if not self.num_firsts:
            return [scores[0] for scores in vectors], found.num_tokens
        seconds = vectors[self.num_firsts :]
        cosines = []
        for index, second in enumerate(seconds):
            cosines.append(_cosine(vectors[index if self.num_firsts > 1 else 0], second))
            # A thousand numbers take a tenth of a millisecond.
            await asyncio.sleep(0)
        return cosines, found.num_tokens


async def compare(serving: Serving, body: VectorFields, pairs: TextPairs) -> Comparison:
    """Returns the request for the scores of `pairs`. Raises ApiError and SplitserveError."""
    model, pooling = serving.served.model, pooling_of(serving.served)
    for param, text in (*pairs.firsts.items(), *pairs.seconds.items()):
        check_text(text, param)
    if len(pairs.firsts) not in (1, len(pairs.seconds)):
        first, second = (
            next(iter(texts)).partition(".")[0] for texts in (pairs.firsts, pairs.seconds)
        )
        message = f"{first} has {len(pairs.firsts)} texts and {second} {len(pairs.seconds)}"
        raise invalid(f"{message}; allowed: as many of each, or one of {first}", first)
    if scores_pairs(model):
        return await _compare_by_label(serving, body, pairs)
    if not embeds(model):
        message = f"the model {model.name!r} scores {len(pooling.labels)} labels, and not how well"
        raise invalid(f"{message} two texts match; allowed: {vector_paths(model)}", "model")
    return await _compare_embeddings(serving, body, pairs)


def _field_of(texts: Mapping[str, str]) -> str:
    return next(iter(texts)).partition(".")[0]


async def _compare_by_label(serving: Serving, body: VectorFields, pairs: TextPairs) -> Comparison:
    firsts = list(pairs.firsts.values())
    of_each = firsts * len(pairs.seconds) if len(firsts) == 1 else firsts
    joined = {
        param: (first, second)
        for first, (param, second) in zip(of_each, pairs.seconds.items(), strict=True)
    }
    inputs = await encode_pairs(serving, joined, body, pairs.max_second_tokens)
    return Comparison(vector_request(serving, body, inputs, PoolingTask.SCORES), 0)


async def _compare_embeddings(serving: Serving, body: VectorFields, pairs: TextPairs) -> Comparison:
    texts = serving.tokenizer.vector_texts
    default = texts.prompt(None)
    first_prompt = texts.query_prompt if pairs.is_search else default
    second_prompt = texts.document_prompt if pairs.is_search else default
    firsts = await encode_inputs(serving, pairs.firsts, body, prompt=first_prompt)
    seconds = await encode_inputs(
        serving, pairs.seconds, body, prompt=second_prompt, max_tokens=pairs.max_second_tokens
    )
    inputs = [*firsts, *seconds]
    asked = vector_request(serving, body, inputs, PoolingTask.EMBEDDING)
    return Comparison(asked, len(firsts))


def _cosine(first: array[float], second: array[float]) -> float:
    """Returns the cosine of two vectors; 0 if one has no length."""
    lengths = math.sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / lengths if lengths else 0.0
