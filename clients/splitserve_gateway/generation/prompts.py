"""Prompts of completions and chats: tokenization, length checks and chat templates.

Long texts are tokenized in a thread, off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from splitserve_client import TokenizerUnavailable
from splitserve_gateway.callers import Caller
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation.stream_places import ResumeHeaders
from splitserve_gateway.grammars import GrammarChecker, TenantChecker
from splitserve_gateway.http import ApiError, invalid, model_unknown
from splitserve_gateway.schemas import (
    ChatFields,
    ChatMessage,
    CompletionRequest,
    ThinkingFields,
    ToolCall,
)
from splitserve_gateway.upstreams import Listed, ServedByScheduler, Upstream
from splitserve_text import (
    Tokenizer,
)

Result = TypeVar("Result")

# Encoding of 1024 characters, or decoding of 1024 tokens, takes about a millisecond.
SMALL_SIZE = 1024
# Fixed cost of one tokenizer call, in characters.
_CHARS_PER_CALL = 16
# No tokenizer in use has longer tokens.
_MAX_TOKEN_CHARS = 256
# Texts rarely have 8 characters per token. Of a text with more than 2 * 8 * max_model_len
# characters, the first 8 * max_model_len are encoded alone. If these have an eighth (plus 128)
# more tokens than the model takes, the whole text has too many as well: later text changes only
# the last words before it.
_MANY_TOKEN_CHARS = 8
_LEAST_EXCESS = 128


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt for the scheduler.

    `is_continued`: the output continues the prompt's text; otherwise the output is a separate text.
    `text`: prompt text for `echo`, or the end of a chat prompt; otherwise empty.
    `encoder_token_ids`: for the model's encoder, if it has one; `token_ids` are the decoder's then.
    """

    token_ids: list[int]
    is_continued: bool
    text: str = ""
    encoder_token_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of encoder and decoder."""
        return len(self.encoder_token_ids) + len(self.token_ids)


async def encode_prompts(body: CompletionRequest, served: ServedByScheduler) -> list[EncodedPrompt]:
    """Returns the encoded prompts of a completion. Prompts of token ids need no tokenizer.

    Raises ApiError and SplitserveError.
    """
    tokenizer, prompts = served.tokenizer, body.prompts
    size = sum(map(len, prompts)) + _CHARS_PER_CALL * len(prompts)
    truncate = body.truncate_prompt_tokens
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(served)
            check_chars("prompt", len(prompt), truncate, served)
        elif truncate is None and len(prompt) > _most_tokens(served):
            raise too_long(f"{len(prompt)} tokens", "prompt", served)
    add_special_tokens = body.add_special_tokens is not False
    decoder = _decoder_prompt(body, served)

    def encode(prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            token_ids = encode_text(prompt, "prompt", truncate, served, add_special_tokens)
        else:
            token_ids = prompt
        cut = truncated(token_ids, truncate, served)
        if decoder is not None:
            return EncodedPrompt(decoder, is_continued=False, encoder_token_ids=cut)
        text = ""
        if body.echo and tokenizer is not None:
            is_whole = isinstance(prompt, str) and len(cut) == len(token_ids)
            text = str(prompt) if is_whole else tokenizer.decode(cut)
        return EncodedPrompt(cut, is_continued=True, text=text)

    if tokenizer is None:
        return list(map(encode, prompts))
    return await run_off_loop(tokenizer, size, lambda: list(map(encode, prompts)))


def _decoder_prompt(body: CompletionRequest, served: ServedByScheduler) -> list[int] | None:
    """Returns the tokens with which the decoder of a model with an encoder begins.

    Returns None for a model without an encoder. Raises ApiError.
    """
    encoder, given = served.model.encoder, body.decoder_prompt
    if encoder is None:
        if given is not None:
            message = "decoder_prompt is set; allowed: null, as the model has no encoder"
            raise invalid(message, "decoder_prompt")
        return None
    if body.echo:
        message = "echo is true; allowed: false, as the output does not continue the prompt"
        raise invalid(message, "echo")
    if not isinstance(given, list) and not encoder.decoder_token_ids:
        message = "decoder_prompt is no list of token ids, and the model does not say how it begins"
        raise invalid(message, "decoder_prompt")
    if given is None:
        return list(encoder.decoder_token_ids)
    if isinstance(given, str):
        token_ids = tokenizer_of(served).encode(given, add_special_tokens=False)
        return [encoder.decoder_token_ids[0], *token_ids]
    return given


def _most_tokens(served: ServedByScheduler) -> int:
    """Returns the most tokens that a prompt may have."""
    encoder = served.model.encoder
    return served.model.max_model_len if encoder is None else encoder.max_tokens


def check_chars(
    param: str, num_chars: int, truncate: int | None, served: ServedByScheduler
) -> None:
    """Raises ApiError for a text too long for any tokenization. Runs before encoding."""
    most = _MAX_TOKEN_CHARS * _most_tokens(served)
    if truncate is None and num_chars > most:
        raise too_long(f"{num_chars} characters", param, served)


def encode_text(
    text: str, param: str, truncate: int | None, served: ServedByScheduler, add_special_tokens: bool
) -> list[int]:
    """Returns the token ids of `text`.

    Raises ApiError early if the beginning already has too many.
    """
    tokenizer = tokenizer_of(served)
    if truncate is None:
        check_beginning(text, param, served, tokenizer)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_beginning(text: str, param: str, served: ServedByScheduler, tokenizer: Tokenizer) -> None:
    """Raises ApiError for a text whose beginning alone has too many tokens."""
    most = _most_tokens(served)
    num_chars = _MANY_TOKEN_CHARS * most
    if len(text) > 2 * num_chars:
        beginning = tokenizer.encode(text[:num_chars], add_special_tokens=False)
        if len(beginning) > most + most // 8 + _LEAST_EXCESS:
            what = f"{len(text)} characters, of which the first {num_chars} are {len(beginning)}"
            raise too_long(f"{what} tokens", param, served)


def too_long(what: str, param: str, served: ServedByScheduler) -> ApiError:
    """Returns a 400 error: the prompt, or a text for a vector, has more tokens than allowed."""
    name = "the prompt" if served.model.pooling is None else param
    # The words for which clients of OpenAI's API look.
    limit = f"This model's maximum context length is {_most_tokens(served)} tokens"
    message = f"{name} has {what}. {limit}"
    return invalid(message, param, "context_length_exceeded")


def truncated(token_ids: list[int], most: int | None, served: ServedByScheduler) -> list[int]:
    """Returns the last `most` of `token_ids`; -1 means what the model takes, None means all.

    A decoder takes one less than max_model_len; an encoder, or a model of vectors, its maximum.
    """
    if most is None:
        return token_ids
    if most == -1:
        generates = served.model.encoder is None and served.model.pooling is None
        most = _most_tokens(served) - generates
    return token_ids[len(token_ids) - most :] if most < len(token_ids) else token_ids


async def run_off_loop(tokenizer: Tokenizer, size: int, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`. Uses a thread if `size` (characters or tokens) is large."""
    return work() if size <= SMALL_SIZE else await tokenizer.in_thread(work, size)


# -- Scheduler and gateway parts that serve a request ----------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestedAdapter:
    """Adapter that a request names as its model.

    `is_listed`: whether a scheduler lists it. Others may know it by its folder alone, and tell when
    they get the request. `models`, `lists`: what there is, for errors.
    """

    name: str
    is_listed: bool
    models: Sequence[str]
    lists: Sequence[Listed]

    def unknown(self) -> ApiError:
        """Returns a 404 error: no scheduler has the adapter."""
        adapters = [name for listed in self.lists for name in listed]
        return model_unknown(self.name, list(dict.fromkeys((*self.models, *adapters))))


@dataclass(frozen=True, slots=True)
class Serving:
    """Chosen scheduler of a request, the model it serves, and the gateway's own parts.

    `adapter`: None for the model itself. `resuming`: what the caller says about ids of events.
    """

    upstream: Upstream
    served: ServedByScheduler
    config: GatewayConfig
    checker: GrammarChecker
    caller: Caller
    adapter: RequestedAdapter | None = None
    resuming: ResumeHeaders = field(default_factory=ResumeHeaders)

    def checker_for(self, user: str | None) -> TenantChecker:
        """Returns the grammar checker for the request's tenant.

        A known caller's tenant takes precedence over `user`, which the request claims.
        """
        return self.checker.of(self.caller.tenant or user or "")

    @property
    def model_name(self) -> str:
        """Name of the model or adapter, for answers."""
        return self.served.model.name if self.adapter is None else self.adapter.name

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model. Raises TokenizerUnavailable."""
        return tokenizer_of(self.served)


def tokenizer_of(served: ServedByScheduler) -> Tokenizer:
    """Returns the tokenizer of the served model. Raises TokenizerUnavailable."""
    if served.tokenizer is None:
        allowed = "POST /v1/completions with a prompt of token ids, whose answer has token_ids"
        if served.model.pooling is not None:
            allowed = "token ids in input of POST /v1/embeddings, /classify and /pooling"
        raise TokenizerUnavailable(
            f"the model {served.model.name!r} is served without a tokenizer"
            f" ({served.tokenizer_problem or 'its executors offer none'}), so text cannot be read"
            f" or written; allowed: {allowed}"
        )
    return served.tokenizer


# -- Chat prompts, rendered by the model's own template --------------------------------------------

# Length of the prompt end that is searched for the beginning of an answer (open reasoning).
_NUM_END_CHARS = 1024
_NUM_END_TOKENS = 16


async def encode_chat(
    body: ChatFields,
    served: ServedByScheduler,
    tools: list[Mapping[str, object]] | None = None,
    truncate: int | None = None,
) -> EncodedPrompt:
    """Renders and encodes a chat. `text` of the result is the end of the rendered prompt.

    Raises ApiError and SplitserveError.
    """
    _check(body)
    if served.model.encoder is not None:
        message = "the model has an encoder and no chats; allowed: POST /v1/completions"
        raise invalid(message, "messages")
    tokenizer = tokenizer_of(served)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.is_thinking is not None:
        for name in ThinkingFields.model_fields:
            variables.setdefault(name, body.is_thinking)
    adds = body.add_generation_prompt and not body.continue_final_message

    def render() -> str:
        return tokenizer.render_chat(
            [_message(message) for message in body.messages or ()],
            tools=tools,
            documents=body.documents,
            add_generation_prompt=adds,
            continue_final_message=body.continue_final_message,
            variables=variables,
        )

    text = await tokenizer.in_thread(render)
    check_chars("messages", len(text), truncate, served)
    adds_special = bool(body.add_special_tokens)
    token_ids = await run_off_loop(
        tokenizer,
        len(text),
        lambda: encode_text(text, "messages", truncate, served, adds_special),
    )
    token_ids = truncated(token_ids, truncate, served)
    return EncodedPrompt(token_ids, body.continue_final_message, text[-_NUM_END_CHARS:])


def chat_of_tokens(token_ids: list[int], tokenizer: Tokenizer) -> EncodedPrompt:
    """Returns the prompt of a chat that the caller has rendered and tokenized."""
    end = tokenizer.decode(token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)
    return EncodedPrompt(token_ids, is_continued=False, text=end)


def _check(body: ChatFields) -> None:
    if not body.messages:
        raise invalid("messages is empty; allowed: 1 or more", "messages")
    is_given = "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and is_given and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid(message, "continue_final_message")


def _message(message: ChatMessage) -> dict[str, Any]:
    """Returns the message in the form that chat templates read."""
    has_content = message.content is not None or message.refusal
    shape: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        # The template decides how to render missing content.
        "content": content_of(message) if has_content else None,
    }
    if message.tool_calls:
        shape["tool_calls"] = list(map(_call, message.tool_calls))
    reasoning = message.reasoning_content or message.reasoning
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    return shape | {name: value for name, value in more.items() if value is not None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    shape = {"id": call.id, "type": call.type, "function": function}
    return {name: value for name, value in shape.items() if value is not None}


def content_of(message: ChatMessage) -> str | list[dict[str, str]]:
    """Returns the content as a text, or as text parts in the form of chat templates."""
    match message.content:
        case None:
            return message.refusal or ""
        case str(text):
            return text
        case parts:
            texts = [part.text if part.type == "text" else part.refusal for part in parts]
            return [{"type": "text", "text": text} for text in texts]
