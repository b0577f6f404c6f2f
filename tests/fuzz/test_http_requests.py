"""Random bytes to the gateway get no status 500, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
)
from tests.fuzz.mutations import json_values, mutated
from tests.fuzz.running import Running, fuzzing, running
from tests.support.processes.gateway import (
    RunningGateway,
    post_bytes,
    running_gateway,
    text_executor,
)
from tests.support.processes.http_clients import Leftovers, wait_for_nothing

SCHEMAS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
VALID: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "one two", "max_tokens": 3},
    "/v1/responses": {"input": "one two", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1, 2]},
}
JSON = "content-type: application/json\r\n"
_MOST_S = 2.0
_names = st.sampled_from(
    (
        *("authorization", "content-type", "content-length", "transfer-encoding", "expect"),
        *("host", "connection", "origin", "cookie", "accept-encoding", "content-encoding", "x"),
    )
)
_values = st.sampled_from(
    ["", "Bearer", "Bearer x", "Basic eDp5", "chunked", "-1", "1" * 40, "100-continue", "gzip"]
) | st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=12)


@dataclass(frozen=True, slots=True)
class Attacked:
    gateway: RunningGateway
    before: Leftovers

    async def send(self, data: bytes, *, wait: bool = True) -> bytes:
        """The first line of the answer, if there is one; and then leaves."""
        reader, writer = await self.gateway.connect()
        try:
            writer.write(data)
            if not wait:
                writer.write_eof()
            async with asyncio.timeout(_MOST_S):
                line = await reader.readline()
        except (OSError, TimeoutError):
            line = b""
        writer.transport.abort()
        return line

    async def check(self, data: bytes, *, wait: bool = True) -> None:
        line = await self.send(data, wait=wait)
        assert line == b"" or line.startswith(b"HTTP/1.1 "), line
        assert not line.startswith(b"HTTP/1.1 500"), line

    async def check_nothing_is_left(self) -> None:
        answer = await self.gateway.post("/v1/completions", prompt="one", max_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3
        await self.gateway.http.aclose()
        try:
            await wait_for_nothing(self.gateway.server, self.gateway.service, self.before)
        except TimeoutError as error:
            tasks = "\n".join(map(str, asyncio.all_tasks()))
            raise AssertionError(f"something is left: {error}\n{tasks}") from error


@asynccontextmanager
async def attacked(folder: Any) -> AsyncIterator[Attacked]:  # noqa: ANN401
    async with running_gateway(text_executor(folder)) as gateway:
        await gateway.post("/v1/completions", prompt="one", max_tokens=1)
        yield Attacked(gateway, Leftovers.now())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Attacked]]:
    with running(attacked(tmp_path_factory.mktemp("tokenizer"))) as started:
        yield started
        started.run(started.target.check_nothing_is_left())


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(SCHEMAS)))
def test_body_is_answered_or_refused_when_its_fields_are_anything(
    target: Running[Attacked], data: st.DataObject, path: str
) -> None:
    names = st.sampled_from(sorted(SCHEMAS[path].model_fields))
    changes = data.draw(st.dictionaries(names, json_values, min_size=1, max_size=4))

    target.run(target.target.check(post_bytes(path, VALID[path] | changes)))


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(VALID)))
def test_body_is_answered_or_refused_when_its_bytes_are_anything(
    target: Running[Attacked], data: st.DataObject, path: str
) -> None:
    body = data.draw(mutated(json.dumps(VALID[path]).encode()) | st.binary(max_size=40))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"

    target.run(target.target.check(head.encode() + body))


@fuzzing
@given(
    path=st.sampled_from(sorted(VALID)),
    headers=st.lists(st.tuples(_names, _values), min_size=1, max_size=4),
)
def test_request_is_answered_or_refused_when_its_headers_are_anything(
    target: Running[Attacked], path: str, headers: list[tuple[str, str]]
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
    body = json.dumps(VALID[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n".encode()

    target.run(target.target.check(head + lines + b"\r\n" + body, wait=False))


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(VALID)))
def test_request_is_answered_or_refused_when_bytes_are_random(
    target: Running[Attacked], data: st.DataObject, path: str
) -> None:
    sent = data.draw(mutated(post_bytes(path, VALID[path])) | st.binary(max_size=60))

    target.run(target.target.check(sent, wait=False))
