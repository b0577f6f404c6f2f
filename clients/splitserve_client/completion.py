"""One completion as text: the pieces of it as they come, and the whole at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from splitserve_client.client import AsyncClient
from splitserve_client.detokenizer import StopStrings
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import Finish, FinishReason, SamplingParams, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text. `is_raw`: no chat template; otherwise one is used if the model has one."""

    text: str
    system: str = ""
    is_raw: bool = False

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Its token ids. Raises ChatTemplateFailed."""
        if not self.is_chat(tokenizer):
            return tokenizer.encode(self.text)
        messages = [{"role": "user", "content": self.text}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.encode_chat(messages)

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether the answer is a new message rather than a continuation."""
        return tokenizer.has_chat_template and not self.is_raw


@dataclass(frozen=True, slots=True)
class Piece:
    """New text with the tokens received since the last piece; the text may lag behind them."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The end; `stop_string` is what ended it, if it was one, and is not part of the text."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None


async def stream_text(
    client: AsyncClient,
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams,
    *,
    stop_strings: Sequence[str] = (),
    request_id: str = "",
    timeout_s: float | None = None,
) -> AsyncGenerator[Piece | End, None]:
    """Streams the text of one completion; the last event is an End. Raises SplitserveError."""
    prompt_token_ids = prompt.encode(tokenizer)
    context = () if prompt.is_chat(tokenizer) else prompt_token_ids
    detokenizer = tokenizer.detokenizer(context)
    stops = StopStrings(stop_strings)
    num_output_tokens = 0
    events = client.generate(prompt_token_ids, params, request_id=request_id, timeout_s=timeout_s)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finish):
                text = stops.push(detokenizer.finish()) + stops.finish()
                if text:
                    yield Piece(text)
                yield End(event.reason, event.usage, stops.found)
                return
            num_output_tokens += len(event.token_ids)
            text = stops.push(detokenizer.push(event.token_ids))
            yield Piece(text, event.token_ids, event.logprobs, event.prompt_logprobs)
            if stops.found is not None:
                usage = Usage(len(prompt_token_ids), num_output_tokens, 0, 0)
                yield End(FinishReason.STOP, usage, stops.found)
                return
