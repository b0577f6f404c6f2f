"""A choice of a chat, as JSON: piece by piece, or whole."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve_client import TokenLogprob
from splitserve_gateway.endpoints.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from splitserve_gateway.endpoints.shapes import Json
from splitserve_gateway.generation.choices import ChoiceEnd, Delta
from splitserve_gateway.grammars.answer_plan import AnswerPlan
from splitserve_gateway.parsing.deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_gateway.parsing.deltas import Delta as Part
from splitserve_gateway.schemas.chat import ChatRequest


class ChatChoice:
    """One choice of a chat.

    `prefix`: what its content begins with that the model was given (`echo`).
    """

    def __init__(
        self,
        index: int,
        body: ChatRequest,
        plan: AnswerPlan,
        names: TokenNames,
        prompt_token_ids: Sequence[int] = (),
        prefix: str = "",
    ) -> None:
        self._index = index
        self._body = body
        self._names = names
        self._parser = plan.new_parser() if plan.has_parts else None
        self._prefix = prefix
        self._has_calls = False
        self._content: list[str] = [prefix] if prefix else []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Json] = []
        self._end: ChoiceEnd | None = None
        self._prompt_token_ids = prompt_token_ids
        self.prompt_scores: tuple[TokenLogprob, ...] = ()

    # -- piece by piece ----------------------------------------------------------------------------

    def first_chunk(self) -> Json:
        """The event that begins it."""
        return self._chunk({"role": "assistant", "content": self._prefix})

    def chunk(self, delta: Delta) -> Json | None:
        """The event that tells `delta`; None if there is nothing to tell."""
        shape = self._shape(self._parts(delta))
        logprobs = self._shape_logprobs(delta.logprobs)
        tells_ids = self._body.return_token_ids and delta.token_ids
        if not (shape or logprobs or delta.end or tells_ids):
            return None
        chunk = self._chunk(shape, logprobs)
        if delta.end is not None:
            chunk["finish_reason"] = self._reason(delta.end)
            chunk["stop_reason"] = delta.end.stop_reason
        if self._body.return_token_ids:
            chunk["token_ids"] = delta.token_ids
        return chunk

    def _chunk(self, delta: Json, logprobs: Sequence[Json] = ()) -> Json:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": None,
        }

    def _shape(self, parts: Sequence[Part]) -> Json:
        """All `parts` in one."""
        if len(parts) == 1 and isinstance(part := parts[0], ContentDelta):
            return {"content": part.text}
        shape: Json = {}
        content = "".join([part.text for part in parts if isinstance(part, ContentDelta)])
        reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningDelta)])
        if content:
            shape["content"] = content
        if reasoning:
            shape["reasoning_content"] = shape["reasoning"] = reasoning
        calls = [
            _call_shape(part)
            for part in parts
            if isinstance(part, ToolCallStart | ToolCallArguments)
        ]
        if calls:
            shape["tool_calls"] = calls
        return shape

    # -- whole -------------------------------------------------------------------------------------

    def add(self, delta: Delta) -> None:
        """Notes `delta` for the whole."""
        for part in self._parts(delta):
            match part:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    self._calls.append(_Call(call_id, name))
                case ToolCallArguments(index, text):
                    self._calls[index].arguments.append(text)
        self._logprobs.extend(self._shape_logprobs(delta.logprobs))
        self._token_ids.extend(delta.token_ids)
        self._end = delta.end or self._end

    def whole(self) -> Json:
        """All that was noted."""
        content = "".join(self._content)
        message: Json = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.shape() for call in self._calls]
        choice: Json = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._reason(self._end) if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def beside(self) -> Json:
        """What the answer has of its prompt."""
        shape: Json = {}
        if self._body.prompt_logprobs is not None:
            shape["prompt_logprobs"] = prompt_logprobs(self.prompt_scores, self._names)
        if self._body.return_token_ids:
            shape["prompt_token_ids"] = self._prompt_token_ids
        return shape

    # -- both --------------------------------------------------------------------------------------

    def _parts(self, delta: Delta) -> list[Part]:
        if self._parser is None:
            return [ContentDelta(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.end is not None:
            parts += self._parser.finish()
        if not self._body.include_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningDelta)]
        self._has_calls |= any(isinstance(part, ToolCallStart) for part in parts)
        return parts

    def _shape_logprobs(self, scores: Sequence[TokenLogprob]) -> list[Json]:
        return chat_logprobs(scores, self._names) if scores else []

    def _reason(self, end: ChoiceEnd) -> str:
        return "tool_calls" if self._has_calls and end.reason == "stop" else end.reason


class _Call:
    def __init__(self, call_id: str, name: str) -> None:
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []

    def shape(self) -> Json:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


def _call_shape(part: ToolCallStart | ToolCallArguments) -> Json:
    if isinstance(part, ToolCallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
