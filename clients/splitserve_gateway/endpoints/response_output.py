"""The output of a response: items, and the events that tell of them as they come."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from splitserve_client import Detokenizer, TokenLogprob
from splitserve_gateway.endpoints.logprobs import TokenNames, chat_logprobs
from splitserve_gateway.endpoints.shapes import Json
from splitserve_gateway.generation.choices import Delta
from splitserve_gateway.grammars.answer_plan import AnswerPlan
from splitserve_gateway.parsing.deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_gateway.parsing.deltas import Delta as Part


class ResponseOutput:
    """`items` are those that have ended; events tell of each from its first token on.

    `detokenizer`: says where in the text each token begins. Which tokens are reasoning, and have
    scores, does not depend on how many came at once.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        names: TokenNames,
        detokenizer: Detokenizer,
        *,
        wants_logprobs: bool,
    ) -> None:
        self._parser = plan.new_parser()
        self._names = names
        self._detokenizer = detokenizer
        self._wants_logprobs = wants_logprobs
        self._item: _Item | None = None
        self._scores: list[tuple[int, TokenLogprob]] = []
        self._starts: list[int] = []  # of tokens that may be reasoning
        self._num_chars = 0
        self.items: list[Json] = []
        self.end_reason = ""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that begin in the model's reasoning or its marks, once that has ended."""
        end = self._parser.num_reasoning_chars
        return 0 if end is None else sum(start < end for start in self._starts)

    def push(self, delta: Delta) -> Iterator[Json]:
        """The events that tell `delta`. What they tell is noted as they are taken."""
        starts = self._starts_of(delta.token_ids)
        if self._wants_logprobs:
            self._scores.extend(zip(starts, delta.logprobs, strict=True))
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.end is not None:
            parts += self._parser.finish()
            self.end_reason = delta.end.reason
        for part in parts:
            yield from self._take(part)
        if delta.end is not None:
            if self._item is None and not self.items:
                yield from self._begin(_Text(len(self.items)))
            yield from self._end("completed" if delta.end.reason == "stop" else "incomplete")

    def _starts_of(self, token_ids: Sequence[int]) -> list[int]:
        """Where they begin, as long as it matters; then anywhere behind the reasoning."""
        end = self._parser.num_reasoning_chars
        if end is not None:
            return [end] * len(token_ids)
        starts = []
        for token_id in token_ids:
            starts.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push((token_id,)))
        self._starts += starts
        return starts

    def _take(self, part: Part) -> Iterator[Json]:
        match part:
            case ContentDelta(text):
                if not isinstance(self._item, _Text):
                    yield from self._begin(_Text(len(self.items) + (self._item is not None)))
                scores = self._shaped_scores()
                assert isinstance(self._item, _Text), "it has begun"
                yield self._item.add(text, scores)
            case ReasoningDelta(text):
                if not isinstance(self._item, _Reasoning):
                    yield from self._begin(_Reasoning(len(self.items) + (self._item is not None)))
                assert isinstance(self._item, _Reasoning), "it has begun"
                yield self._item.add(text)
            case ToolCallStart(_, call_id, name):
                index = len(self.items) + (self._item is not None)
                yield from self._begin(_Call(index, call_id, name))
                self._scores.clear()
            case ToolCallArguments(_, text):
                assert isinstance(self._item, _Call), "a call has begun"
                self._scores.clear()
                yield self._item.add(text)

    def _shaped_scores(self) -> list[Json]:
        reasoned = self._parser.num_reasoning_chars or 0
        scores = [score for start, score in self._scores if start >= reasoned]
        self._scores.clear()
        return chat_logprobs(scores, self._names)

    def _begin(self, item: _Item) -> Iterator[Json]:
        yield from self._end("completed")
        self._item = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Json]:
        if self._item is not None:
            yield from self._item.end(status)
            self.items.append(self._item.shape(status))
            self._item = None


class _Item:
    """An item of the output that has begun. `index`: its place."""

    prefix = ""

    def __init__(self, index: int) -> None:
        self.item_id = f"{self.prefix}_{secrets.token_hex(16)}"
        self.place: Json = {"item_id": self.item_id, "output_index": index}
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> Iterator[Json]:
        item = self.shape("in_progress")
        yield _event("output_item.added", output_index=self.place["output_index"], item=item)

    def end(self, status: str) -> Iterator[Json]:
        item = self.shape(status)
        yield _event("output_item.done", output_index=self.place["output_index"], item=item)

    def shape(self, status: str) -> Json:
        """The item as JSON."""
        raise NotImplementedError


class _Text(_Item):
    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._scores: list[Json] = []
        self._where = {**self.place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        yield from super().begin()
        yield _event("content_part.added", **self._where, part=self._part())

    def add(self, text: str, scores: list[Json]) -> Json:
        self.pieces.append(text)
        self._scores.extend(scores)
        return _event("output_text.delta", **self._where, delta=text, logprobs=scores)

    def end(self, status: str) -> Iterator[Json]:
        yield _event("output_text.done", **self._where, text=self.text, logprobs=self._scores)
        yield _event("content_part.done", **self._where, part=self._part())
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self._part()],
        }

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._scores),
        }


class _Reasoning(_Item):
    prefix = "rs"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._where = {**self.place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        yield from super().begin()
        yield _event("content_part.added", **self._where, part=self._part())

    def add(self, text: str) -> Json:
        self.pieces.append(text)
        return _event("reasoning_text.delta", **self._where, delta=text)

    def end(self, status: str) -> Iterator[Json]:
        yield _event("reasoning_text.done", **self._where, text=self.text)
        yield _event("content_part.done", **self._where, part=self._part())
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [],
            "content": [] if status == "in_progress" else [self._part()],
            "status": status,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._name = name

    def add(self, text: str) -> Json:
        self.pieces.append(text)
        return _event("function_call_arguments.delta", **self.place, delta=text)

    def end(self, status: str) -> Iterator[Json]:
        done = {"name": self._name, "arguments": self.text}
        yield _event("function_call_arguments.done", **self.place, **done)
        yield from super().end(status)

    def shape(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }


def _event(kind: str, **fields: object) -> Json:
    return {"type": f"response.{kind}", **fields}
