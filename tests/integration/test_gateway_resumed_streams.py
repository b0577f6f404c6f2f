"""Streams over HTTP that go on at another gateway: ids of events, and `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import (
    RunningGateway,
    running_gateway,
    serving,
    text_executor,
    url_of,
)
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT: dict[str, Any] = {"prompt": "the fox", "seed": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox?"}], "seed": 5}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {**PROMPT, "max_tokens": 24}),
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 24, "stream_options": {"include_usage": True}},
    ),
    "choices": ("/v1/chat/completions", {**CHAT, "max_tokens": 12, "n": 3}),
    "batch": ("/v1/completions", {"prompt": ["the", "fox"], "n": 2, "seed": 5, "max_tokens": 12}),
    "drawn seed": ("/v1/completions", {"prompt": ["the", "fox"], "max_tokens": 12}),
    "response": ("/v1/responses", {"input": "the fox?", "max_output_tokens": 24, "seed": 5}),
    "message": ("/v1/messages", {**CHAT, "model": "fake", "max_tokens": 24}),
}


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a stream. `data`: as it was sent."""

    event_id: str
    data: str

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)
        return found


@dataclass(frozen=True, slots=True)
class Gateways:
    """A gateway, a second one before the same scheduler, and the watch of the executor's steps."""

    first: RunningGateway
    second: httpx2.AsyncClient
    watch: StepWatch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateways]:
    watch = StepWatch()
    executor = text_executor(tmp_path_factory.mktemp("files"), fault=watch)
    async with running_gateway(executor) as running:
        config = GatewayConfig(schedulers=running.service.scheduler.address)
        async with (
            serving(config) as server,
            httpx2.AsyncClient(
                base_url=url_of(server), timeout=PATIENCE_S, trust_env=False
            ) as second,
        ):
            yield Gateways(running, second, watch)


def events_of(text: str) -> list[Event]:
    """The events of a stream, with all of its bytes."""
    events = []
    for block in text.split("\n\n"):
        fields = [line.partition(": ") for line in block.split("\n") if line]
        values = {name: value for name, _, value in fields if name}
        if "data" in values:
            events.append(Event(values.get("id", ""), values["data"]))
    return events


async def read(
    http: httpx2.AsyncClient,
    path: str,
    body: Mapping[str, object],
    last_event_id: str | None = None,
    **headers: str,
) -> list[Event]:
    """The events of the whole stream."""
    if last_event_id is not None:
        headers["last-event-id"] = last_event_id
    response = await http.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


async def read_part(gateways: Gateways, path: str, body: object, num_steps: int) -> list[Event]:
    """The events that come while that many steps run; then the client is gone."""
    blocks: list[str] = []

    async def read_on() -> None:
        request = gateways.first.http.stream("POST", path, json=body)
        async with request as response:
            async for text in response.aiter_text():
                blocks.append(text)  # noqa: PERF401  # has what came before the end

    gateways.watch.hold(after=num_steps)
    reading = asyncio.create_task(read_on())
    await gateways.watch.wait_held()
    reading.cancel()
    await asyncio.wait({reading})
    gateways.watch.release()
    await gateways.first.service.wait_idle()
    text = "".join(blocks)
    return events_of(text[: text.rfind("\n\n") + 2])


def joined(events: Sequence[Event]) -> dict[str, str]:
    """All texts of a stream's increments, by where they belong."""
    texts: dict[str, str] = {}

    def add(place: str, text: object) -> None:
        texts[place] = texts.get(place, "") + str(text)

    for event in events:
        if event.data == "[DONE]":
            continue
        content = event.content
        for choice in content.get("choices", ()):
            for name, value in {**choice, **choice.get("delta", {})}.items():
                if name in {"text", "content", "finish_reason"} and value is not None:
                    add(f"{choice['index']} {name}", value)
        kind = content.get("type", "")
        if kind.endswith("delta") and isinstance(content.get("delta"), str):
            add(f"{kind} {content['output_index']}", content["delta"])
        elif kind:
            add("kinds", f"{kind} " if "delta" not in kind else "")
            text = content.get("delta", {}).get("text", "") if kind.endswith("delta") else ""
            add(kind, text)
    return texts


def ids_in(events: Sequence[Event]) -> set[str]:
    """Ids of the answer and its items."""
    found: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, dict):
            found.update(v for k, v in value.items() if k in {"id", "item_id", "created"} and v)
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    for event in events:
        if event.data != "[DONE]":
            look(event.content)
    return found


@pytest.mark.parametrize("name", STREAMS)
async def test_stream_goes_on_after_each_of_its_events(gateways: Gateways, name: str) -> None:
    path, body = STREAMS[name]
    whole = await read(gateways.first.http, path, body)
    num_ids = sum(event.data != "[DONE]" for event in whole)
    assert len({event.event_id for event in whole[:num_ids]}) == num_ids
    steps_before = len(gateways.watch.steps)
    for number in range(1, num_ids + 1, 1 + num_ids // 12):
        rest = await read(gateways.second, path, body, whole[number - 1].event_id)
        assert joined([*whole[:number], *rest]) == joined(whole), number
        assert ids_in(rest) <= ids_in(whole)
        if path != "/v1/responses" and path != "/v1/messages":
            assert rest[-1].data == "[DONE]"
    # The output was kept: nothing is computed again.
    assert len(gateways.watch.steps) == steps_before


@pytest.mark.parametrize("name", ["completion", "choices", "message"])
async def test_stream_goes_on_where_the_client_was_lost(gateways: Gateways, name: str) -> None:
    path, body = STREAMS[name]
    body = {**body, "stream": True}
    whole = await read(gateways.first.http, path, body)
    part = await read_part(gateways, path, body, 9)
    assert 1 < len(part) < len(whole)
    rest = await read(gateways.second, path, body, part[-1].event_id)
    assert joined([*part, *rest]) == joined(whole)
    # The stream that went on can be lost as well.
    again = await read(gateways.first.http, path, body, rest[0].event_id)
    assert joined([*part, rest[0], *again]) == joined(whole)


async def test_events_are_not_repeated_in_chunks(gateways: Gateways) -> None:
    path, body = STREAMS["completion"]
    whole = await read(gateways.first.http, path, body)
    assert len({event.event_id for event in whole[:-1]}) == len(whole) - 1
    for before, after in pairwise(whole[:-1]):
        rest = await read(gateways.second, path, body, before.event_id)
        assert rest[0].content["choices"][0]["text"].startswith(after.content["choices"][0]["text"])


@pytest.mark.parametrize("name", ["completion", "message"])
async def test_request_is_refused_when_nothing_is_kept(gateways: Gateways, name: str) -> None:
    path, body = STREAMS[name]
    whole = await read(gateways.first.http, path, body)
    last = whole[-2].event_id
    unknown = f"{'0' * 32}{last[32:]}"
    response = await gateways.second.post(
        path, json={**body, "stream": True}, headers={"last-event-id": unknown}
    )
    assert response.status_code == 410
    error = response.json()["error"]
    assert error.get("code", error.get("details", {}).get("error_code")) == "output_unknown"
    # Another prompt is another request.
    changed = {**body, "prompt": "the hare"} if "prompt" in body else {**body, "system": "Other."}
    response = await gateways.second.post(
        path, json={**changed, "stream": True}, headers={"last-event-id": last}
    )
    assert response.status_code == 410


async def test_stream_begins_anew_when_nothing_was_read(gateways: Gateways) -> None:
    path, body = STREAMS["chat"]
    first = (await read(gateways.first.http, path, body))[0]
    head, _, rest = first.event_id.partition(".")
    unknown = f"{'0' * len(head)}.{rest}"
    resumed = await read(gateways.second, path, body, unknown)
    whole = await read(gateways.first.http, path, body)
    assert joined([first, *resumed]) == joined(whole)


@pytest.mark.parametrize(
    ("last_event_id", "changes"),
    [
        ("17", {}),
        ("x" * 4000, {}),
        (f"{'a' * 32}.1.0_0.0.1.1", {}),
        (f"{'a' * 32}.1.0.3.1.1", {}),
        (f"{'a' * 32}.1.0.0.1.1", {"stream": False}),
        (f"{'a' * 32}.1.0.0.1.1", {"logprobs": 1}),
    ],
    ids=["number", "long", "two choices", "choice 3", "not streamed", "logprobs"],
)
async def test_unusable_id_is_refused(
    gateways: Gateways, last_event_id: str, changes: dict[str, object]
) -> None:
    path, body = STREAMS["completion"]
    response = await gateways.second.post(
        path, json={**body, "stream": True, **changes}, headers={"last-event-id": last_event_id}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "last_event_id_invalid"
    assert error["message"].startswith("Last-Event-ID")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "changes", [{"logprobs": 1}, {"n": 20}, {"best_of": 3, "n": 2}], ids=["logprobs", "n", "best"]
)
async def test_events_have_no_ids_when_their_stream_cannot_be_resumed(
    gateways: Gateways, changes: dict[str, object]
) -> None:
    path, body = STREAMS["completion"]
    events = await read(gateways.first.http, path, {**body, "max_tokens": 2, **changes})
    assert {event.event_id for event in events} == {""}


async def test_events_have_ids_for_users_of_aiohttp_when_asked_for(gateways: Gateways) -> None:
    path, body = STREAMS["completion"]
    agent = {"user-agent": "Python/3.12 aiohttp/3.13.0"}
    bare = await read(gateways.first.http, path, body, **agent)
    assert {event.event_id for event in bare} == {""}
    for headers in ({"accept": "text/event-stream"}, {"last-event-id": ""}):
        events = await read(gateways.first.http, path, body, **agent, **headers)
        assert all(event.event_id for event in events[:-1])


async def test_streams_are_not_kept_when_that_is_off(tmp_path: Path) -> None:
    config = GatewayConfig(resume_streams_s=0.0)
    async with running_gateway(text_executor(tmp_path), config=config) as running:
        path, body = STREAMS["completion"]
        events = await read(running.http, path, body)
        assert {event.event_id for event in events} == {""}


async def test_stream_goes_on_at_the_scheduler_that_kept_it(tmp_path: Path) -> None:
    """Of two schedulers the second gateway asks each until one has the output."""
    executors = [text_executor(tmp_path), text_executor(tmp_path)]
    async with running_gateway(executors[0]) as one, running_gateway(executors[1]) as other:
        addresses = [each.service.scheduler.address for each in (one, other)]
        config = replace(GatewayConfig(), schedulers=",".join(addresses))
        async with (
            serving(config) as server,
            httpx2.AsyncClient(
                base_url=url_of(server), timeout=PATIENCE_S, trust_env=False
            ) as http,
        ):
            path, body = STREAMS["completion"]
            whole = await read(one.http, path, body)

            async def resume() -> tuple[bool, str]:
                response = await http.post(
                    path,
                    json={**body, "stream": True},
                    headers={"last-event-id": whole[3].event_id},
                )
                return response.status_code == 200, response.text

            await poll(resume, PATIENCE_S)  # the gateway finds both in its own time
            for _ in range(4):
                is_resumed, text = await resume()
                assert is_resumed, text
                assert joined([*whole[:4], *events_of(text)]) == joined(whole)
