"""Who is let in over HTTP, by OpenAI's client; before a scheduler that knows callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.server import RunningServer, ServerSecurity
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_callers import KnowingScheduler, key
from tests.support.fakes.fake_generation import VOCAB_SIZE
from tests.support.fakes.fake_scheduler import start
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.bearer import bearer
from tests.support.security.callers import OneKey

OWN_KEY = "the-key-of-the-gateway"
GATEWAY = key("gateway", "gateway")
ALICE = "sk-ss-alice-secret"
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
    config = GatewayConfig(
        schedulers=f"127.0.0.1:{running.port}",
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


async def test_credential_that_nobody_knows_is_refused_as_openai_does(gateway: Guarded) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        await gateway.complete("sk-ss-alice-wrong")
    assert (refused.value.status_code, refused.value.code) == (401, "invalid_api_key")
    assert "sk-ss-alice-wrong" not in str(refused.value)
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    assert gateway.scheduler.submitted == []


async def test_credential_that_is_for_something_else_is_refused(gateway: Guarded) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="scopes lack `generate`"):
        await gateway.complete("an-operator")
    assert gateway.scheduler.submitted == []


async def test_caller_sees_no_model_that_is_not_for_it(gateway: Guarded) -> None:
    async with gateway.client(ALICE) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
    async with gateway.client("without-models") as client:
        assert [model.id async for model in client.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("fake")
        with pytest.raises(openai.PermissionDeniedError):
            await client.completions.create(**COMPLETION)
    assert gateway.scheduler.submitted == []


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/healthy"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_path_needs_a_credential(gateway: Guarded, method: str, path: str) -> None:
    for api_key in (None, "wrong"):
        assert await gateway.status(method, path, api_key, {}) == 401
    assert await gateway.status(method, path, ALICE, {}) != 401


def test_routes_are_all_that_there_are(gateway: Guarded) -> None:
    paths = gateway.server.app.openapi()["paths"]
    tried = {path.replace("/fake", "/{model_id}") for _, path in ROUTES}
    assert {path for path in paths if not path.startswith("/health")} <= tried


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_health_needs_no_credential(gateway: Guarded, path: str) -> None:
    assert await gateway.status("GET", path, None) == 200


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


async def test_quota_is_told_with_the_time_to_wait(gateway: Guarded) -> None:
    def refuse(_: str) -> None:
        raise DomainError("QUOTA_EXCEEDED", "requests per minute of tenant a", retry_delay_s=12.5)

    gateway.scheduler.before_accepting = refuse
    with pytest.raises(openai.RateLimitError, match="requests per minute") as refused:
        await gateway.complete(ALICE)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "13"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("CALLER_UNKNOWN", openai.AuthenticationError),
        ("CALLER_NOT_ALLOWED", openai.PermissionDeniedError),
    ],
)
async def test_scheduler_has_the_last_word_while_a_caller_is_remembered(
    gateway: Guarded, reason: str, error: type[openai.APIStatusError]
) -> None:
    await gateway.complete(ALICE)

    def refuse(_: str) -> None:
        raise DomainError(reason, "not you")

    gateway.scheduler.before_accepting = refuse
    with pytest.raises(error, match="not you"):
        await gateway.complete(ALICE)


async def test_strangers_are_refused_and_callers_are_not_when_many_keys_are_tried(
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


async def test_stranger_is_told_to_come_again_when_schedulers_look_at_no_more_tokens(
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


async def test_stream_ends_with_the_error_when_its_caller_is_revoked_before_it_goes_on(
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


async def test_gateway_serves_nobody_when_its_own_key_is_no_longer_valid(
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
async def test_no_caller_is_blamed_at_the_moment_when_the_own_key_is_that_of_no_gateway_any_more(
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


async def test_gateway_serves_nobody_when_the_scheduler_asks_nobody_who_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_door = key("", "generate", "gateway", "tenants", "operator")
    open_door.knows_callers = False
    scheduler = KnowingScheduler(keys={ALICE: open_door, OWN_KEY: open_door})
    async with guarded(tmp_path, scheduler) as running:
        await wait_for_log(caplog, "upstream_refused")
        assert "asks nobody for a key" in caplog.text
        assert await running.status("GET", "/health/ready", None) == 503
        assert await running.status("POST", "/v1/completions", ALICE, COMPLETION) == 503
        assert scheduler.submitted == []


async def wait_for_log(caplog: pytest.LogCaptureFixture, event: str) -> None:
    async def look() -> tuple[bool, str]:
        return event in caplog.text, caplog.text

    await poll(look, PATIENCE_S)
