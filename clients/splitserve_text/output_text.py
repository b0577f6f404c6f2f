"""Text of a request's completions: stop strings, the text of one sequence, and its stream."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from splitserve_text.detokenizer import Detokenizer
from splitserve_text.tokenizer import Tokenizer
from splitserve_text.values import (
    Finish,
    FinishReason,
    SamplingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    Usage,
)


class _Prefix:
    """Common prefix, of length `depth`, of the sorted stop strings `stops[start:end]`.

    State of an Aho-Corasick automaton (CACM 1975), created when a text first reaches it. So the
    cost depends on what texts have in common with stop strings, and is linear in the length of a
    text. `shorter`: the longest proper suffix of this prefix that is a prefix too; None for the
    empty one. `found`: the longest stop string that is a suffix of this prefix.
    """

    __slots__ = ("children", "depth", "end", "found", "shorter", "start")

    def __init__(self, depth: int, start: int, end: int) -> None:
        self.depth = depth
        self.start = start
        self.end = end
        self.shorter: _Prefix | None = None
        self.found: str | None = None
        self.children: dict[str, _Prefix] = {}


class StopStrings:
    """Cuts text at the first stop string; holds back what may be the start of a stop string.

    If several stop strings end in the same piece of text, such as that of one token, the one that
    starts first wins, then the longest. With `include` the stop string stays in the text.
    """

    def __init__(self, stop_strings: Sequence[str] = (), *, include: bool = False) -> None:
        self._stops = sorted({stop for stop in stop_strings if stop})
        self._include = include
        firsts = "".join(sorted({re.escape(stop[0]) for stop in self._stops}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._root = _Prefix(0, 0, len(self._stops))
        self._state = self._root
        self._held = ""
        self.found: str | None = None

    def __bool__(self) -> bool:
        """Returns whether there are stop strings."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns newly displayable text.

        Sets `found` when a stop string ends it.

        `may_end`: whether a stop string that ends within `text` counts; False for the text of the
        first `min_tokens` tokens. Its start may lie in earlier text.
        """
        if self._first is None:
            return text
        if self.found is not None:
            return ""
        num_held = len(self._held)
        position, best = 0, None
        while position < len(text):
            if self._state is self._root:
                match = self._first.search(text, position)
                if match is None:
                    break
                position = match.start()
            known = self._state.children.get(text[position])
            self._state = known or self._next(self._state, text[position])
            position += 1
            stop = self._state.found
            if may_end and stop is not None:
                hit = (num_held + position - len(stop), -len(stop), stop)
                best = hit if best is None else min(best, hit)
        text = self._held + text
        if best is not None:
            start, _, self.found = best
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        num_shown = len(text) - self._num_to_hold()
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """Returns the text that was held back; no text may follow."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self) -> int:
        """Returns the length of the text's end to hold back: it may start a stop string."""
        state: _Prefix | None = self._state
        while state is not None:
            # The last stop string with this prefix is longer than it, unless it is the only one.
            if state.depth < len(self._stops[state.end - 1]):
                return state.depth
            state = state.shorter
        return 0

    def _next(self, state: _Prefix, character: str) -> _Prefix:
        """Returns the longest prefix that is a suffix of the text after one more character."""
        following: _Prefix | None = None
        made: list[_Prefix] = []
        node: _Prefix | None = state
        while node is not None:
            child = node.children.get(character)
            is_new = child is None
            if child is None:
                child = self._make_child(node, character)
            if child is not None:
                following = following or child
                if made:
                    made[-1].shorter = child
                if not is_new:
                    break
                made.append(child)
            node = node.shorter
        for prefix in reversed(made):
            prefix.shorter = prefix.shorter or self._root
            prefix.found = prefix.found or prefix.shorter.found
        return following or self._root

    def _make_child(self, prefix: _Prefix, character: str) -> _Prefix | None:
        """Returns the prefix extended by `character`; None if no stop string starts with it."""
        depth, start, end = prefix.depth, prefix.start, prefix.end

        def following(stop: str) -> str:
            return stop[depth : depth + 1]

        start = bisect_left(self._stops, character, start, end, key=following)
        end = bisect_right(self._stops, character, start, end, key=following)
        if start == end:
            return None
        child = _Prefix(depth + 1, start, end)
        # The shortest stop string with this prefix comes first.
        if len(self._stops[start]) == depth + 1:
            child.found = self._stops[start]
        prefix.children[character] = child
        return child


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules for turning tokens into text; `stream_text` explains the first three.

    `hidden_token_ids`: tokens that add no text.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()


class OutputText:
    """Turns tokens into text. `num_tokens`: tokens read, including those of the stop string.

    `min_tokens`: stop strings do not end the text within this many first tokens.
    """

    def __init__(self, detokenizer: Detokenizer, rules: TextRules, min_tokens: int) -> None:
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._hidden = rules.hidden_token_ids
        self._stops: StopStrings | None = None
        if any(rules.stop_strings):
            self._stops = StopStrings(rules.stop_strings, include=rules.include_stop_string)
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the text; None if no stop string did."""
        return None if self._stops is None else self._stops.found

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Returns the text that `token_ids` add, and the number of tokens read: 0 after the end."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(self._shown(token_ids)), len(token_ids)
        if self._stops.found is not None:
            return "", 0
        pieces: list[str] = []
        # Token by token: the end must not depend on how many tokens arrive together.
        for number, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            text = self._detokenizer.push(self._shown((token_id,)))
            pieces.append(self._stops.push(text, may_end=self._may_end))
            if self._stops.found is not None:
                return "".join(pieces), number
        return "".join(pieces), len(token_ids)

    def finish(self) -> str:
        """Returns the text that was held back; no token may follow."""
        if self._stops is None:
            return self._detokenizer.finish()
        if self._stops.found is not None:
            return ""
        text = self._stops.push(self._detokenizer.finish(), may_end=self._may_end)
        return text + self._stops.finish()

    @property
    def _may_end(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._hidden.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._hidden]


class TokenNumbers:
    """Detokenizer that shows token ids as numbers, for models without a tokenizer."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the token ids, separated by spaces."""
        if not token_ids:
            return ""
        separator, self._separator = self._separator, " "
        return separator + " ".join(map(str, token_ids))

    def finish(self) -> str:
        """Returns an empty text: nothing is held back."""
        return ""

    def fork(self) -> Self:
        """Copies the detokenizer; the copy continues independently."""
        return copy(self)


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
