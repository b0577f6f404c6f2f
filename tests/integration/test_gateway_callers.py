"""Authentication over HTTP before a scheduler that knows callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import httpx2
import openai
import pytest

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_contract import DomainError
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_gateway.sharing import FairSemaphore
from splitserve_rpc import RunningServer, ServerSecurity
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import VOCAB_SIZE, FakeScheduler, start
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, until, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.credentials import OneKey, bearer


def key(tenant: str, *scopes: str, may_use_model: bool = True) -> scheduler_pb2.IdentifyResponse:
    """What is known of a credential, to generate if nothing else is said."""
    return scheduler_pb2.IdentifyResponse(
        knows_callers=True,
        caller=f"key of {tenant}",
        tenant=tenant,
        scopes=scopes or ("generate",),
        may_use_model=may_use_model,
    )


@dataclass
class KnowingScheduler(FakeScheduler):
    """Knows `keys`. `identified`: what it was asked about; `submitted`: whose requests came.

    `answers`: whether it answers who somebody is. `before_accepting` may refuse a request,
    `before_identifying` to say who somebody is.
    """

    keys: dict[str, scheduler_pb2.IdentifyResponse] = field(default_factory=dict)
    identified: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    before_accepting: Callable[[str], None] = lambda credential: None
    before_identifying: Callable[[str], None] = lambda credential: None

    def __post_init__(self) -> None:
        self.answers.set()

    def before_submit(self, submit: scheduler_pb2.SessionSubmit) -> None:
        self.submitted.append(submit.credential)
        if submit.credential not in self.keys:
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid")
        self.before_accepting(submit.credential)

    async def Identify(  # noqa: N802
        self, request: scheduler_pb2.IdentifyRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.IdentifyResponse:
        self.identified.append(request.credential)
        await self.answers.wait()
        self.before_identifying(request.credential)
        try:
            return self.keys[request.credential]
        except KeyError:
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid") from None


OWN_KEY = "the-key-of-the-gateway"
GATEWAY = key("gateway", "gateway")
ALICE = "sk-ss-alice-secret"
BOB = "sk-ss-bob-secret"
COMPLETION: dict[str, Any] = {"prompt": [3, 4], "max_tokens": 3, "model": "fake"}
FILES = {"tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode()}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A gateway, and the scheduler behind it."""

    scheduler: KnowingScheduler
    access: OneKey
    running: RunningServer
    server: Server
    http: httpx2.AsyncClient
    key_file: Path

    def client(self, api_key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{url_of(self.server)}/v1", api_key=api_key, max_retries=0
        )

    async def complete(self, api_key: str) -> str:
        async with self.client(api_key) as client:
            answer: openai.types.Completion = await client.completions.create(**COMPLETION)
            return answer.choices[0].text

    async def status(self, method: str, path: str, api_key: str | None, body: object = None) -> int:
        headers = dict(bearer(api_key))
        return (await self.http.request(method, path, headers=headers, json=body)).status_code

    async def wait_ready(self, status: int = 200) -> None:
        async def ask() -> tuple[bool, int]:
            found = (await self.http.get("/health/ready")).status_code
            return found == status, found

        await poll(ask, PATIENCE_S)


@asynccontextmanager
async def guarded(
    folder: Path, scheduler: KnowingScheduler, max_concurrent_requests: int = 4096
) -> AsyncIterator[Guarded]:
    key_file = folder / "gateway.key"
    key_file.write_text(f"{OWN_KEY}\n")
    access = OneKey(OWN_KEY)
    running = await start(scheduler, security=ServerSecurity(access))
    address = f"127.0.0.1:{running.port}"
    config = GatewayConfig(
        schedulers=address,
        operator_schedulers=address,
        gateway_key_file=key_file,
        max_concurrent_requests=max_concurrent_requests,
    )
    try:
        async with (
            serving(config) as server,
            httpx2.AsyncClient(
                base_url=url_of(server), trust_env=False, timeout=PATIENCE_S
            ) as http,
        ):
            yield Guarded(scheduler, access, running, server, http, key_file)
    finally:
        await running.server.stop(None)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Guarded]:
    scheduler = KnowingScheduler(tokenizer_files=FILES)
    scheduler.keys = {
        OWN_KEY: GATEWAY,
        ALICE: key("a"),
        "an-operator": key("o", "operator"),
        "without-models": key("w", may_use_model=False),
    }
    async with guarded(tmp_path, scheduler) as running:
        await running.wait_ready()
        yield running


async def test_request_is_answered_and_carries_the_credential_of_its_caller(
    gateway: Guarded,
) -> None:
    scheduler = gateway.scheduler
    scheduler.keys["another"] = key("b")
    assert len((await gateway.complete(ALICE)).split()) == 3
    await gateway.complete("another")
    await gateway.complete(ALICE)
    assert scheduler.submitted == [ALICE, "another", ALICE]
    # The gateway itself has a key of its own, on every call.
    assert {brought for method, brought in gateway.access.calls if method != "Check"} == {
        f"Bearer {OWN_KEY}"
    }
    # Who a caller is was asked for; again only after 5 s, which a busy machine may take.
    identified = [credential for credential in scheduler.identified if credential != OWN_KEY]
    assert list(dict.fromkeys(identified)) == [ALICE, "another"]


async def test_credential_that_is_for_something_else_is_refused(gateway: Guarded) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="lacks the scope `generate`"):
        await gateway.complete("an-operator")
    assert gateway.scheduler.submitted == []


async def test_adapters_are_listed_with_the_credential_of_the_caller(gateway: Guarded) -> None:
    gateway.access.key = None
    gateway.scheduler.adapters = {"formal": "/formal"}
    async with gateway.client(ALICE) as client:
        assert [model.id async for model in client.models.list()] == ["fake", "formal"]
    listed = {credential for method, credential in gateway.access.calls if method == "ListAdapters"}
    assert listed == {f"Bearer {ALICE}"}


async def test_adapters_are_loaded_with_the_credential_of_an_operator(gateway: Guarded) -> None:
    gateway.access.key = None
    body = {"lora_name": "formal", "lora_path": "/formal"}
    loaded = "/v1/load_lora_adapter"
    assert await gateway.status("POST", loaded, None, body) == 401
    assert await gateway.status("POST", loaded, ALICE, body) == 403
    assert gateway.scheduler.adapters == {}
    assert await gateway.status("POST", loaded, "an-operator", body) == 200
    assert gateway.scheduler.adapters == {"formal": "/formal"}
    assert ("LoadAdapter", "Bearer an-operator") in gateway.access.calls
    unload = {"lora_name": "formal"}
    assert await gateway.status("POST", "/v1/unload_lora_adapter", ALICE, unload) == 403
    assert await gateway.status("POST", "/v1/unload_lora_adapter", "an-operator", unload) == 200
    assert gateway.scheduler.adapters == {}


async def test_caller_sees_no_model_that_is_not_for_it(gateway: Guarded) -> None:
    async with gateway.client(ALICE) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
    async with gateway.client("without-models") as client:
        assert [model.id async for model in client.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("fake")
        with pytest.raises(openai.PermissionDeniedError):
            await client.completions.create(**COMPLETION)
    assert gateway.scheduler.submitted == []


async def test_body_is_not_read_when_nobody_knows_who_sends_it(gateway: Guarded) -> None:
    config = gateway.server.config
    for authorization in (b"", b"authorization: Bearer wrong\r\n"):
        reader, writer = await asyncio.open_connection(config.host, config.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        writer.write(head + authorization + b"content-length: 1000000\r\n\r\n")
        # Not told to go on.
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in await reader.read()
        writer.close()


async def test_strangers_alone_are_refused_when_many_keys_are_tried(
    gateway: Guarded,
) -> None:
    scheduler = gateway.scheduler
    await gateway.complete(ALICE)
    scheduler.answers.clear()
    strangers = [
        asyncio.create_task(gateway.status("GET", "/v1/models", f"guess-{number}"))
        for number in range(60)
    ]
    refused = 0
    for done in asyncio.as_completed(strangers):
        refused += await done == 503
        if refused == 28:
            break
    assert await gateway.status("GET", "/v1/models", ALICE) == 200
    scheduler.answers.set()
    statuses = await asyncio.gather(*strangers)
    assert (statuses.count(503), statuses.count(401)) == (28, 32)


async def test_stranger_gets_503_when_schedulers_check_no_more_tokens(
    gateway: Guarded,
) -> None:
    def refuse(credential: str) -> None:
        if credential != OWN_KEY:
            raise DomainError("QUOTA_EXCEEDED", "too many tokens", retry_delay_s=0.001)

    await gateway.complete(ALICE)
    gateway.scheduler.before_identifying = refuse
    with pytest.raises(openai.InternalServerError) as refused:
        await gateway.complete("a-new-token")
    assert (refused.value.status_code, refused.value.code) == (503, "too_many_callers")
    await gateway.complete(ALICE)


async def test_stream_ends_with_an_error_when_caller_revoked_before_resumption(
    gateway: Guarded,
) -> None:
    scheduler = gateway.scheduler

    def cut(number: int) -> None:
        if number == 2:
            del scheduler.keys[ALICE]
            raise DomainError("DRAINING", "the scheduler is shutting down")

    scheduler.before_token = cut
    async with gateway.client(ALICE) as client:
        stream = await client.completions.create(**COMPLETION, stream=True)
        await anext(stream)
        await anext(stream)
        with pytest.raises(openai.APIError, match="not valid") as raised:
            await anext(stream)
    assert raised.value.code == "invalid_api_key"


async def test_gateway_serves_nobody_when_its_key_is_revoked(
    gateway: Guarded,
) -> None:
    await gateway.complete(ALICE)
    gateway.access.key = "a-new-key"
    await gateway.wait_ready(503)
    assert await gateway.status("GET", "/v1/models", "unknown") == 503
    gateway.scheduler.keys["a-new-key"] = GATEWAY
    gateway.key_file.write_text("a-new-key")
    await gateway.wait_ready()
    await gateway.complete(ALICE)


@pytest.mark.parametrize(
    ("caller", "reason", "left"),
    [
        (ALICE, "CALLER_UNKNOWN", None),
        ("a-stranger", "CALLER_UNKNOWN", None),
        (ALICE, "CALLER_NOT_ALLOWED", key("gateway", "generate")),
    ],
)
async def test_caller_is_not_blamed_when_the_gateway_key_is_revoked(
    gateway: Guarded,
    caller: str,
    reason: str,
    left: scheduler_pb2.IdentifyResponse | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = gateway.scheduler
    scheduler.keys["a-stranger"] = key("s")
    await gateway.complete(ALICE)

    def revoke(credential: str) -> None:
        """What is asked by then is refused, as the scheduler does, by a reason of callers."""
        if credential == caller:
            if left is None:
                gateway.access.key = "another-key"
            else:
                scheduler.keys[OWN_KEY] = left
            raise DomainError(reason, "not you")

    scheduler.before_accepting = scheduler.before_identifying = revoke
    with pytest.raises(openai.InternalServerError) as refused:
        await gateway.complete(caller)
    assert (refused.value.status_code, refused.value.code) == (503, "upstream_refused")
    assert "upstream_refused" in caplog.text


async def test_gateway_serves_nobody_when_scheduler_asks_for_no_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_door = key("", "generate", "gateway", "tenants", "operator")
    open_door.knows_callers = False
    scheduler = KnowingScheduler(keys={ALICE: open_door, OWN_KEY: open_door})
    async with guarded(tmp_path, scheduler) as running:
        await until(lambda: "upstream_refused" in caplog.text)
        assert "requires no key" in caplog.text
        assert await running.status("GET", "/health/ready", None) == 503
        assert await running.status("POST", "/v1/completions", ALICE, COMPLETION) == 503
        assert scheduler.submitted == []


# -- what one tenant leaves to others --------------------------------------------------------------


LONG = {"prompt": "t1 " * 1000}


@pytest.fixture
async def small_gateway(tmp_path: Path) -> AsyncIterator[Guarded]:
    scheduler = KnowingScheduler(tokenizer_files=FILES)
    scheduler.keys = {OWN_KEY: GATEWAY, ALICE: key("a"), BOB: key("b")}
    async with guarded(tmp_path, scheduler, max_concurrent_requests=20) as running:
        await running.wait_ready()
        yield running


async def test_bodies_that_never_come_hold_not_all_places(small_gateway: Guarded) -> None:
    url = urlsplit(url_of(small_gateway.server))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n"
    writers = []
    for _ in range(24):
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"{head}content-length: 100\r\n\r\n".encode())
        writers.append(writer)

    async def is_full() -> tuple[bool, int]:
        status = await small_gateway.status("GET", "/v1/models", ALICE)
        return status == 429, status

    await poll(is_full, PATIENCE_S)
    assert await small_gateway.status("GET", "/v1/models", BOB) == 200
    for writer in writers:
        writer.close()


async def test_tenants_take_turns_at_the_tokenizer(small_gateway: Guarded) -> None:
    places = FairSemaphore(1, 100)
    state = small_gateway.server.app.state
    state.gateway = replace(state.gateway, tokenizing=places)
    order: list[str] = []

    async def tokenize(credential: str) -> None:
        assert await small_gateway.status("POST", "/tokenize", credential, LONG) == 200
        order.append(credential)

    async with places.place("a"):
        tasks = [asyncio.create_task(tokenize(ALICE)) for _ in range(6)]
        await until(lambda: places.num_waiting == 6)
        tasks.append(asyncio.create_task(tokenize(BOB)))
        await until(lambda: places.num_waiting == 7)
        # What is small waits for none of it.
        assert await small_gateway.status("POST", "/tokenize", ALICE, {"prompt": "t1"}) == 200
    await asyncio.gather(*tasks)
    assert order.index(BOB) <= 3
