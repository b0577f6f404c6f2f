"""Requests of all kinds over all ways, and what each brings: `ASKS`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx2

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    Completion,
    Finish,
    Generation,
    JsonSchema,
    Regex,
    SamplingParams,
    Session,
    Tokens,
    collect_generation,
)
from tests.support.processes.http_clients import HttpAnswer

# Is told of output tokens as they come.
Heard = Callable[[int], None]
NUM_TOKENS = 80


@dataclass(frozen=True, slots=True)
class Ways:
    """How a scheduler and a gateway are asked."""

    client: AsyncClient
    session: Session
    http: httpx2.AsyncClient


class AnswerBroken(Exception):
    """The answer did not come to its end. `answer`: what there is of it; `code`: who says why."""

    def __init__(self, answer: HttpAnswer, code: str) -> None:
        super().__init__(code)
        self.answer = answer
        self.code = code


class Ask(Protocol):
    """A request whose answer is the same each time."""

    @property
    def name(self) -> str:
        """For people."""

    async def answer(self, ways: Ways, heard: Heard) -> object:
        """What it brings; two of them are equal. Raises what a client is told."""


@dataclass(frozen=True, slots=True)
class GrpcAsk:
    """By the Python client: as a call of its own, or over a session that many share."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    is_in_session: bool = False

    async def answer(self, ways: Ways, heard: Heard) -> tuple[Completion, ...]:
        if self.is_in_session:
            generation = await self._collect(ways.session.submit(self.prompt, self.params), heard)
        else:
            async with aclosing(ways.client.generate(self.prompt, self.params)) as events:
                generation = await self._collect(events, heard)
        return generation.completions

    async def _collect(self, events: AsyncIterator[Tokens | Finish], heard: Heard) -> Generation:
        async def noted() -> AsyncIterator[Tokens | Finish]:
            async for event in events:
                if isinstance(event, Tokens):
                    heard(len(event.token_ids))
                yield event

        return await collect_generation(noted(), self.params.num_completions)


@dataclass(frozen=True, slots=True)
class HttpAsk:
    """Over the gateway; streamed if the body says so."""

    name: str
    path: str
    body: Mapping[str, Any]

    async def answer(self, ways: Ways, heard: Heard) -> HttpAnswer:
        answer = HttpAnswer()
        try:
            async with ways.http.stream("POST", self.path, json=dict(self.body)) as response:
                if response.status_code != 200:
                    raise AnswerBroken(answer, await _code_of(response))
                if not self.body.get("stream"):
                    await response.aread()
                    heard(NUM_TOKENS)
                    return HttpAnswer.whole(response.json())
                await self._read(response, answer, heard)
        except httpx2.TransportError as error:
            raise AnswerBroken(answer, "disconnected") from error
        return answer

    async def _read(self, response: httpx2.Response, answer: HttpAnswer, heard: Heard) -> None:
        async for line in response.aiter_lines():
            event = answer.add_line(line)
            if event is None:
                continue
            if event.get("error"):
                raise AnswerBroken(answer, str(event["error"]["code"]))
            if event.get("type") == "response.failed":
                raise AnswerBroken(answer, str(event["response"]["error"]["code"]))
            heard(1)


async def _code_of(response: httpx2.Response) -> str:
    await response.aread()
    error = response.json()["error"]
    return f"{response.status_code} {error['code']}: {error['message']}"


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95, seed=17)
_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},'
_SCHEMA += '"required":["a","b"],"additionalProperties":false}'
_PARAMS: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "greedy_long": replace(GREEDY, max_tokens=2 * NUM_TOKENS),
    "sampled": SAMPLED,
    "scored": replace(SAMPLED, num_logprobs=3, num_prompt_logprobs=1),
    "penalties": replace(
        SAMPLED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=20
    ),
    "n": replace(SAMPLED, n=3),
    "best_of": replace(SAMPLED, n=2, best_of=3),
    "beams": replace(GREEDY, n=2, beam_search=BeamSearch(3), max_tokens=NUM_TOKENS // 2),
    "json": replace(SAMPLED, grammar=JsonSchema(_SCHEMA), ignore_eos=False),
    "regex": replace(SAMPLED, grammar=Regex("[a-z ]{60}"), ignore_eos=False),
    "biased": replace(SAMPLED, min_p=0.05, top_k=40, logit_bias={300: 2.0}, seed=23),
    "stopped": replace(SAMPLED, stop_token_ids=tuple(range(200, 230)), ignore_eos=False),
}
_PROMPTS = ((1, 4, 500, 501, 502), (1, 4, *range(400, 440), 2, 5))
_STORY = "Tell me a story about a fox."
_SHORT = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_SEVERAL = {"n": 3, "seed": 6, "logprobs": 0}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
_COMPLETIONS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "sampled": {"seed": 5},
    "n": _SEVERAL,
    "stopped": {"seed": 7, "stop": [" the", "fox"]},
    "penalties": {"seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "best_of": {"seed": 9, "best_of": 3},
    "beams": {"n": 2, "use_beam_search": True, "temperature": 0},
    "batch": {"seed": 10, "prompt": ["One", "Two two", "Three"], "echo": True},
}
_CHATS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 11, "n": 2},
    "json": {"seed": 12, "response_format": _FORMAT, "ignore_eos": False},
    "scored": {"seed": 13, "logprobs": True, "top_logprobs": 2},
}


def _http(kind: str, path: str, body: Mapping[str, Any]) -> list[HttpAsk]:
    return [
        HttpAsk(f"{kind} streamed", path, {**_SHORT, **body, **_STREAMED}),
        HttpAsk(f"{kind} whole", path, {**_SHORT, **body}),
    ]


def _all_asks() -> list[Ask]:
    asks: list[Ask] = []
    for name, params in _PARAMS.items():
        asks += [
            GrpcAsk(f"{way} {name} {len(prompt)}", prompt, params, way == "session")
            for way, prompt in zip(("generate", "session"), _PROMPTS, strict=True)
        ]
    for name, body in _COMPLETIONS.items():
        asks += _http(f"completion {name}", "/v1/completions", {"prompt": _STORY, **body})
    for name, body in _CHATS.items():
        messages = [{"role": "user", "content": _STORY}]
        asks += _http(f"chat {name}", "/v1/chat/completions", {"messages": messages, **body})
    story = {"input": _STORY, "seed": 14, "max_output_tokens": NUM_TOKENS}
    asks.append(HttpAsk("response streamed", "/v1/responses", {**story, "stream": True}))
    return asks


# Of the order in which they begin, next to each other are those that differ.
ASKS: tuple[Ask, ...] = tuple(_all_asks())


async def answers_of(asks: tuple[Ask, ...], ways: Sequence[Ways]) -> dict[str, object]:
    """What they bring while nothing disturbs them, by name. Raises ExceptionGroup of all errors."""
    found = await asyncio.gather(
        *(ask.answer(ways[number % len(ways)], lambda _: None) for number, ask in enumerate(asks)),
        return_exceptions=True,
    )
    failed = list[Exception]()
    for ask, answer in zip(asks, found, strict=True):
        if isinstance(answer, Exception):
            answer.add_note(ask.name)
            failed.append(answer)
    if failed:
        raise ExceptionGroup(f"unanswered: {[error.__notes__ for error in failed]}", failed)
    return dict(zip((ask.name for ask in asks), found, strict=True))
