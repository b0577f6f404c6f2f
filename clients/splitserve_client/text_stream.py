"""Text of completions as a stream: pieces of each completion, then the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from splitserve_client.detokenizer import Detokenizer
from splitserve_client.output_text import OutputText, TextRules, TokenNumbers
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import (
    Finish,
    FinishReason,
    SamplingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, with the tokens received since the last piece; the text may lag behind them.

    `index`: number of the completion. `finish`: set if this is the completion's last piece;
    `stop_string`: the stop string that ended the completion, if any.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish: SequenceFinish | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """End of a request. `stop_string`: the one that ended the text, if any; not part of the text.

    With several completions, `reason` and `stop_string` are those of the first.
    """

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None


class RequestTexts:
    """Converts the events of one request to the texts of all its completions.

    `continues_prompt`: the text continues that of `prompt_token_ids`; False in a chat. Without a
    `tokenizer` the texts consist of token ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        rules: TextRules | None = None,
        *,
        continues_prompt: bool = False,
    ) -> None:
        self._num_prompt_tokens = len(prompt_token_ids)
        rules = rules or TextRules()
        context = prompt_token_ids if continues_prompt else ()

        detokenizer: Detokenizer = TokenNumbers()
        if tokenizer is not None:
            skips = rules.skip_special_tokens
            detokenizer = tokenizer.detokenizer(context, skip_special_tokens=skips)
        self._texts = [
            _Text(index, OutputText(detokenizer.fork(), rules, params.min_tokens or 0), params)
            for index in range(params.num_completions)
        ]

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all texts, including the tokens that ended them."""
        return sum(text.output.num_tokens for text in self._texts)

    def receive(self, event: Tokens | Finish) -> list[Piece | End]:
        """Returns the pieces that `event` adds.

        After an End no more follow; the request may be aborted.
        """
        if isinstance(event, Finish):
            pieces = [text.end(event) for text in self._texts]
            end = self._end(event.usage, is_aborted=event.reason is FinishReason.ABORTED)
            return [*(piece for piece in pieces if piece is not None), end]
        piece = self._texts[event.index].push(event)
        if piece is None:
            return []
        if piece.finish is not None and self._may_be_aborted():
            # The server does not know stop strings: closing the stream ends the request.
            usage = Usage(self._num_prompt_tokens, self.num_output_tokens, 0, 0)
            return [piece, self._end(usage)]
        return [piece]

    async def read(
        self, events: AsyncIterator[Tokens | Finish]
    ) -> AsyncGenerator[Piece | End, None]:
        """Reads `events` and yields pieces up to the End."""
        async for event in events:
            for part in self.receive(event):
                yield part
                if isinstance(part, End):
                    return

    def _may_be_aborted(self) -> bool:
        """Returns whether all texts have ended while some sequence still runs."""
        has_ended = all(text.finish is not None for text in self._texts)
        return has_ended and not all(text.is_computed for text in self._texts)

    def _end(self, usage: Usage, *, is_aborted: bool = False) -> End:
        first = self._texts[0]
        assert first.finish is not None, "all texts have ended"
        reason = FinishReason.ABORTED if is_aborted else first.finish.reason
        return End(reason, usage, first.output.stop_string)


class _Text:
    """Text of one completion. `finish`: how it ended; `is_computed`: its sequence has ended."""

    def __init__(self, index: int, output: OutputText, params: SamplingParams) -> None:
        self.output = output
        self.finish: SequenceFinish | None = None
        self.is_computed = False
        self._index = index
        self._is_streamed = params.is_streamed

    def push(self, tokens: Tokens) -> Piece | None:
        """Returns the piece that `tokens` add; None if they add nothing, as after the end."""
        token_ids, logprobs, scores = tokens.token_ids, tokens.logprobs, tokens.prompt_logprobs
        if tokens.finish is not None:
            self.is_computed = True
        if self.finish is not None:
            return None
        text, num_read = self.output.push(token_ids)
        if num_read < len(token_ids):
            token_ids, logprobs = token_ids[:num_read], logprobs[:num_read]
        if tokens.finish is not None:
            text += self.output.finish()
        stop_string = self.output.stop_string
        if stop_string is not None or tokens.finish is not None:
            self.finish = self._end_of_text(tokens.finish)
            if self.finish is not None:
                return Piece(
                    text, token_ids, logprobs, scores, self._index, self.finish, stop_string
                )
        if token_ids or scores:
            return Piece(text, token_ids, logprobs, scores, self._index)
        return None

    def end(self, end: Finish) -> Piece | None:
        """Returns the last piece of a completion that had not ended before its request."""
        finish = SequenceFinish(self._index, end.reason, end.stop_token_id, self.output.num_tokens)
        return self.push(Tokens((), index=self._index, finish=finish))

    def _end_of_text(self, finish: SequenceFinish | None) -> SequenceFinish | None:
        """Returns the end of the text if it ends here. `finish`: end of its sequence, if any."""
        if self.output.stop_string is None:
            return finish
        if finish is None:
            # If the best sequences are chosen at the end, that end follows soon and has the scores.
            if not self._is_streamed:
                return None
            finish = SequenceFinish(self._index, FinishReason.STOP, None, 0)
        return replace(
            finish,
            reason=FinishReason.STOP,
            stop_token_id=None,
            num_output_tokens=self.output.num_tokens,
        )
