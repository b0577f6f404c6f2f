"""Harmful requests, slow readers and overload affect only their own client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.endpoints import completions
from splitserve_gateway.endpoints import shapes as choice_answers
from splitserve_gateway.generation import Event, TextRequest, stream_choices
from tests.support.processes.gateway import (
    RunningGateway,
    held_gateway,
    post_bytes,
    running_gateway,
    text_executor,
)

COMPLETION = {"prompt": "one two", "max_tokens": 40, "seed": 1}
PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("tokenizer"), num_device_blocks=4096)
    executor.max_model_len = 4096
    config = GatewayConfig(max_body_bytes=2**20, max_unread_bytes=2**16)
    async with running_gateway(executor, config=config, max_unread_mib=1) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/nothing", {}, 404),
        ("GET", PATH, {}, 405),
        ("POST", PATH, {"content": b"x" * (2**20 + 1), "headers": JSON}, 413),
        ("POST", PATH, {"content": b"{}"}, 415),
        ("POST", PATH, {"data": {"prompt": "x"}}, 415),
        ("POST", PATH, {"content": b"{}", "headers": {"content-encoding": "gzip"}}, 415),
        ("POST", PATH, {"content": b'{"prompt":' + b"[" * 50_000, "headers": JSON}, 400),
        ("POST", PATH, {"json": {"prompt": "x", "model": "nobody"}}, 404),
    ],
)
async def test_refusals_have_one_shape(
    gateway: RunningGateway, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    response = await gateway.http.request(method, path, **options)

    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"] == "POST"


async def test_only_one_request_fails_when_it_meets_a_fault(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(completions, "text_request", broken)
        response = await gateway.http.post(PATH, json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "secret" not in response.text
    assert "a secret" in caplog.text
    await gateway.post(PATH, **COMPLETION)


async def test_stream_ends_with_an_error_when_a_fault_occurs(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(request: TextRequest) -> AsyncIterator[Event]:
        async for event in stream_choices(request):
            yield event
            raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(choice_answers, "stream_choices", broken)
        first, last = await gateway.stream(PATH, **COMPLETION)
    assert first["choices"]
    assert last["error"]["code"] == "internal"
    await gateway.service.wait_idle()


async def test_stream_is_aborted_when_its_client_does_not_read(
    gateway: RunningGateway,
) -> None:
    fleet = gateway.server.app.state.gateway.fleet
    loop = asyncio.get_running_loop()
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await loop.sock_connect(plain, (gateway.server.config.host, gateway.server.config.port))
        body = {"prompt": "x", "max_tokens": 3500, "stream": True, "logprobs": 20}
        await loop.sock_sendall(plain, post_bytes(PATH, body))
        # Its tokens do not fit into what lies between; then it is aborted, and its blocks are free.
        await gateway.until(lambda: fleet.num_session_requests == 1)
        await gateway.until(lambda: fleet.num_session_requests == 0)
        await gateway.service.wait_idle()
        assert fleet.unread.num_bytes == 0
        assert gateway.server.exchanges.num_open == 1

        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await loop.sock_recv(plain, 2**20)
    *_, error, done = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(error[6:])["error"]["code"] == "stream_not_read"
    assert done == b"data: [DONE]"
    # Nowhere near all of it.
    assert answer.count(b"data: ") < 3000


async def test_running_request_is_aborted_when_others_were_sent_ahead(tmp_path: Path) -> None:
    async with held_gateway(tmp_path) as (gateway, watch):
        reader, writer = await gateway.connect()
        writer.write(post_bytes(PATH, {**COMPLETION, "max_tokens": 900}) * 3)
        await watch.wait_held()
        writer.close()
        # Nothing has been sent, and nothing would be for long.
        await gateway.until(lambda: gateway.server.exchanges.num_open == 0)
        watch.release()
        await gateway.service.wait_idle()
        assert len(watch.steps) < 20
        del reader


async def test_requests_are_refused_with_429_when_there_are_too_many(tmp_path: Path) -> None:
    config = GatewayConfig(max_concurrent_requests=2)
    async with held_gateway(tmp_path, config) as (gateway, watch):
        waiting = [asyncio.create_task(gateway.post(PATH, **COMPLETION)) for _ in range(2)]
        await gateway.until(lambda: gateway.server.exchanges.num_open == 2)
        response = await gateway.http.post(PATH, json=COMPLETION)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "too_many_requests"
        assert int(response.headers["retry-after"]) >= 1
        assert (await gateway.http.get("/health/live")).status_code == 200
        watch.release()
        await asyncio.gather(*waiting)


async def test_request_is_refused_with_429_when_the_queue_is_full(tmp_path: Path) -> None:
    async with held_gateway(tmp_path, max_num_waiting=1, max_num_seqs=1) as (gateway, watch):
        waiting = [asyncio.create_task(gateway.post(PATH, **COMPLETION))]
        await watch.wait_held()
        waiting.append(asyncio.create_task(gateway.post(PATH, **COMPLETION)))
        await gateway.service.wait_until_queued(1)
        response = await gateway.http.post(PATH, json={**COMPLETION, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        watch.release()
        await asyncio.gather(*waiting)


async def test_request_ends_when_it_takes_longer_than_it_may(tmp_path: Path) -> None:
    config = GatewayConfig(request_timeout_s=0.3)
    async with held_gateway(tmp_path, config) as (gateway, watch):
        error = await gateway.refusal(PATH, COMPLETION, 504)
        assert error["type"] == "timeout_error"
        assert gateway.server.exchanges.num_open == 0
        watch.release()


async def test_stream_ends_with_an_error_when_the_drain_times_out(
    tmp_path: Path,
) -> None:
    async with held_gateway(tmp_path, after=3) as (gateway, watch):
        streaming = asyncio.create_task(gateway.stream(PATH, **{**COMPLETION, "max_tokens": 900}))
        await watch.wait_held()
        draining = asyncio.create_task(gateway.server.exchanges.drain(0.2))
        await gateway.until(lambda: gateway.server.exchanges.is_draining)
        ready = await gateway.http.get("/health/ready")
        assert ready.status_code == 503
        response = await gateway.http.post(PATH, json=COMPLETION)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        *_, last = await streaming
        assert last["error"]["code"] == "draining"
        await draining
        watch.release()
