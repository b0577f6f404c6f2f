"""Prompts: text to token ids, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.upstreams.upstream import Served

Result = TypeVar("Result")

# Encoding takes about a millisecond for so many characters.
_SMALL_CHARS = 1024


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the scheduler takes it.

    `is_continued`: the output goes on in the middle of its text; otherwise it is a text of its own.
    `text`: what an echo shows; empty if none is asked for.
    """

    token_ids: list[int]
    is_continued: bool
    text: str = ""


async def encode_prompts(body: CompletionRequest, served: Served) -> list[EncodedPrompt]:
    """The prompts of a completion. Raises SplitserveError."""
    tokenizer = tokenizer_of(served)
    prompts = body.prompts
    num_chars = sum(map(len, prompts))
    add_special_tokens = body.add_special_tokens is not False

    def encode(prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = prompt
        cut = truncated(token_ids, body.truncate_prompt_tokens, served)
        text = ""
        if body.echo:
            is_whole = isinstance(prompt, str) and len(cut) == len(token_ids)
            text = str(prompt) if is_whole else tokenizer.decode(cut)
        return EncodedPrompt(cut, is_continued=True, text=text)

    return await beside_the_loop(num_chars, lambda: list(map(encode, prompts)))


def truncated(token_ids: list[int], most: int | None, served: Served) -> list[int]:
    """The last `most` of `token_ids`; of -1, as many as the model takes."""
    if most is None:
        return token_ids
    most = served.model.max_model_len - 1 if most == -1 else most
    return token_ids[len(token_ids) - most :] if most < len(token_ids) else token_ids


async def beside_the_loop(num_chars: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, which takes time by `num_chars`; in a thread if it may be long."""
    if num_chars <= _SMALL_CHARS:
        return work()
    return await asyncio.to_thread(work)
