"""Prompts: text to token ids, beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from splitserve_client import Tokenizer
from splitserve_gateway.generation.serving import tokenizer_of
from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.schemas.completions import CompletionRequest
from splitserve_gateway.upstreams.upstream import Served

Result = TypeVar("Result")

# Encoding takes about a millisecond for so many characters, decoding for so many tokens.
SMALL_SIZE = 1024
# What it takes to begin.
_CHARS_PER_CALL = 16
# No tokenizer that is in use has longer tokens.
_MAX_TOKEN_CHARS = 256
# Hardly a text has so many characters for each token. Of one that is twice as long as a model then
# takes, the beginning tells whether it fits: it has an eighth more tokens, and some, than the model
# takes only if the whole has too many as well. What comes after a text changes its last words only.
_MANY_TOKEN_CHARS = 8
_LEAST_EXCESS = 128


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
    """The prompts of a completion; those of token ids need no tokenizer.

    Raises ApiError and SplitserveError.
    """
    tokenizer, prompts = served.tokenizer, body.prompts
    size = sum(map(len, prompts)) + _CHARS_PER_CALL * len(prompts)
    truncate = body.truncate_prompt_tokens
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(served)
            check_chars("prompt", len(prompt), truncate, served)
        elif truncate is None and len(prompt) > served.model.max_model_len:
            raise _too_long(f"{len(prompt)} tokens", "prompt", served)
    add_special_tokens = body.add_special_tokens is not False

    def encode(prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            token_ids = encode_text(prompt, "prompt", truncate, served, add_special_tokens)
        else:
            token_ids = prompt
        cut = truncated(token_ids, truncate, served)
        text = ""
        if body.echo and tokenizer is not None:
            is_whole = isinstance(prompt, str) and len(cut) == len(token_ids)
            text = str(prompt) if is_whole else tokenizer.decode(cut)
        return EncodedPrompt(cut, is_continued=True, text=text)

    if tokenizer is None:
        return list(map(encode, prompts))
    return await beside_the_loop(tokenizer, size, lambda: list(map(encode, prompts)))


def check_chars(param: str, num_chars: int, truncate: int | None, served: Served) -> None:
    """Raises ApiError for a text that is too long whatever its tokens are, before it is encoded."""
    most = _MAX_TOKEN_CHARS * served.model.max_model_len
    if truncate is None and num_chars > most:
        raise _too_long(f"{num_chars} characters", param, served)


def encode_text(
    text: str, param: str, truncate: int | None, served: Served, add_special_tokens: bool
) -> list[int]:
    """The tokens of `text`. Raises ApiError for too many, as soon as the beginning has so many."""
    tokenizer = tokenizer_of(served)
    most = served.model.max_model_len
    num_chars = _MANY_TOKEN_CHARS * most
    if truncate is None and len(text) > 2 * num_chars:
        beginning = tokenizer.encode(text[:num_chars], add_special_tokens=False)
        if len(beginning) > most + most // 8 + _LEAST_EXCESS:
            what = f"{len(text)} characters, of which the first {num_chars} are {len(beginning)}"
            raise _too_long(f"{what} tokens", param, served)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _too_long(what: str, param: str, served: Served) -> ApiError:
    message = f"the prompt has {what}; the model takes at most {served.model.max_model_len} tokens"
    return invalid(message, param, "context_length_exceeded")


def truncated(token_ids: list[int], most: int | None, served: Served) -> list[int]:
    """The last `most` of `token_ids`; of -1, as many as the model takes."""
    if most is None:
        return token_ids
    most = served.model.max_model_len - 1 if most == -1 else most
    return token_ids[len(token_ids) - most :] if most < len(token_ids) else token_ids


async def beside_the_loop(tokenizer: Tokenizer, size: int, work: Callable[[], Result]) -> Result:
    """The result of `work` with `size` characters or tokens; in a thread if that may take long."""
    return work() if size <= SMALL_SIZE else await tokenizer.in_thread(work, size)
