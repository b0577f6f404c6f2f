"""API keys and certificates of a client."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve_client import (
    AsyncClient,
    CallerUnknown,
    ClientConfig,
    CredentialsUnusable,
    QuotaExceeded,
    SamplingParams,
    ServerUnreachable,
    TlsFiles,
)
from splitserve_contract import DomainError
from splitserve_rpc import Access, ServerSecurity, Tls
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import (
    VOCAB_SIZE,
    Cut,
    FakeScheduler,
    expected_tokens,
    start,
)
from tests.support.models import tiny_tokenizers
from tests.support.processes.addresses import reserve_address
from tests.support.security.cluster import Certificates
from tests.support.security.credentials import OneKey
from tests.unit.client.conftest import VirtualTime

PROMPT = [3, 4, 5]
KEY = "sk-ss-a1-the-secret-of-alice"
PARAMS = SamplingParams(seed=7, max_tokens=3)


@pytest.fixture
def access() -> OneKey:
    return OneKey(KEY)


@pytest.fixture
async def knowing(fake: FakeScheduler, access: OneKey) -> AsyncIterator[str]:
    """The address of a server that knows `KEY`."""
    fake.tokenizer_files = {"tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode()}
    running = await start(fake, security=ServerSecurity(access))
    yield f"127.0.0.1:{running.port}"
    await running.server.stop(None)


async def _call_everything(client: AsyncClient) -> None:
    await client.complete(PROMPT, PARAMS)
    async with client.session() as session:
        assert [part async for part in session.submit(PROMPT, PARAMS)]
    await client.abort("any")
    await client.get_model()
    await client.get_tokenizer_files()
    await client.list_executors()
    await client.list_adapters()
    await client.load_adapter("a", "/a")
    await client.unload_adapter("a")
    await client.is_serving()


async def test_every_call_brings_the_key(knowing: str, access: OneKey) -> None:
    async with AsyncClient(knowing, ClientConfig(api_key=KEY)) as client:
        await _call_everything(client)
    methods = {method for method, brought in access.calls if brought == f"Bearer {KEY}"}
    assert methods >= {
        "Generate", "Session", "Abort", "GetModel", "GetTokenizer", "ListExecutors", "Check",
        "ListAdapters", "LoadAdapter", "UnloadAdapter",
    }  # fmt: skip
    assert methods == {method for method, _ in access.calls}


async def test_no_call_brings_a_key_when_there_is_none(address: str, fake: FakeScheduler) -> None:
    access = OneKey()
    running = await start(fake, security=ServerSecurity(access))
    async with AsyncClient(f"127.0.0.1:{running.port}") as client:
        await client.get_model()
    assert access.calls == [("GetModel", "")]
    await running.server.stop(None)


async def test_calls_bring_what_the_file_says_then(
    knowing: str, access: OneKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    async with AsyncClient(knowing, ClientConfig(api_key_file=file)) as client:
        await client.get_model()
        access.key = "sk-ss-a2-another"
        with pytest.raises(CallerUnknown):
            await client.get_model()
        file.write_text("sk-ss-a2-another")
        await client.get_model()
        # What is no credential is not taken, and not shown.
        file.write_text("no credential")
        await client.get_model()
        await client.get_model()
    assert caplog.text.count("api_key_files_unusable") == 1
    assert "not a credential:" in caplog.text
    assert "a2-another" not in caplog.text


@pytest.mark.parametrize("text", ["", "two words", "é", "line\nbreak", "x" * 8193])
def test_what_is_no_credential_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    for config in (ClientConfig(api_key=text), ClientConfig(api_key_file=file)):
        with pytest.raises(CredentialsUnusable, match="allowed: 1 to 8192") as refused:
            AsyncClient(config=config)
        assert not text or text not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ClientConfig(api_key_file="/nowhere"), "/nowhere: No such file"),
        (ClientConfig(api_key=KEY, api_key_file="/nowhere"), "allowed: one of them"),
        (ClientConfig(tls=TlsFiles(ca=Path("/nowhere"))), "/nowhere: No such file"),
        (
            ClientConfig(tls=TlsFiles(cert=Path("/dev/null"))),
            "/dev/null: certificate and key require each other",
        ),
    ],
)
def test_credentials_are_refused_by_name_when_they_cannot_be_used(
    config: ClientConfig, problem: str
) -> None:
    with pytest.raises(CredentialsUnusable, match=problem) as refused:
        AsyncClient(config=config)
    assert KEY not in str(refused.value)


def test_key_is_not_shown_with_the_configuration() -> None:
    assert KEY not in repr(ClientConfig(api_key=KEY))


async def test_unknown_caller_is_told_so_at_once(
    knowing: str, access: OneKey, virtual_time: VirtualTime
) -> None:
    config = replace(virtual_time.config(), api_key="sk-ss-a1-wrong")
    async with AsyncClient(knowing, config) as client:
        with pytest.raises(CallerUnknown):
            await client.complete(PROMPT)
        assert [method for method, _ in access.calls] == ["Generate"]
        async with client.session() as session:
            with pytest.raises(CallerUnknown):
                assert [part async for part in session.submit(PROMPT, PARAMS)] == []
    assert [method for method, _ in access.calls] == ["Generate", "Session"]


def _exceed(fake: FakeScheduler, *numbers: int) -> None:
    """Refuses the requests with these numbers."""

    def before_request(request: object) -> None:
        if len(fake.requests) - 1 in numbers:
            raise DomainError("QUOTA_EXCEEDED", "requests_per_minute is 1", 30.0)

    fake.before_request = before_request


async def test_quota_is_raised_when_nothing_has_begun(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    _exceed(fake, 0)
    with pytest.raises(QuotaExceeded) as raised:
        await client.complete(PROMPT, PARAMS)
    assert raised.value.retry_delay_s == 30.0
    assert len(fake.requests) == 1


async def test_quota_is_waited_for_when_a_stream_goes_on(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    _exceed(fake, 1)

    def before_token(number: int) -> None:
        if number == 1:
            raise Cut

    fake.before_token = before_token
    generation = await client.complete(PROMPT, PARAMS)
    assert list(generation.token_ids) == expected_tokens(PROMPT, 7, 3)
    assert 30.0 in virtual_time.pauses_s


# -- certificates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of another authority."""
    return Certificates.make(tmp_path_factory.mktemp("new"))


def _put(certificates: Certificates, directory: Path) -> TlsFiles:
    """Copies what a client needs."""
    for name in ("operator.crt", "operator.key", "ca.crt"):
        shutil.copy(certificates.directory / name, directory / name)
    return Certificates(directory).files("operator")


def _security(certificates: Certificates) -> ServerSecurity:
    return ServerSecurity(Access(), Tls(certificates.files("scheduler")))


async def test_client_connects_with_the_files_that_are_there_then(
    fake: FakeScheduler, old: Certificates, new: Certificates, tmp_path: Path
) -> None:
    running = await start(fake, security=_security(new))
    address = f"127.0.0.1:{running.port}"
    async with AsyncClient(address, ClientConfig(tls=_put(old, tmp_path))) as client:
        with pytest.raises(ServerUnreachable, match="with TLS"):
            await client.get_model()
        _put(new, tmp_path)
        assert (await client.get_model()).name == "fake"
    await running.server.stop(None)


async def _is_disconnected(client: AsyncClient) -> tuple[bool, None]:
    return not client.is_connected, None


async def test_what_is_open_goes_on_when_there_are_other_certificates(
    fake: FakeScheduler, old: Certificates, new: Certificates, tmp_path: Path
) -> None:
    address, begun, fake.hold = reserve_address(), asyncio.Event(), asyncio.Event()
    fake.before_token = lambda number: begun.set()
    first = await start(fake, address, _security(old))
    async with AsyncClient(address, ClientConfig(tls=_put(old, tmp_path))) as client:
        generating = asyncio.create_task(client.complete(PROMPT, PARAMS))
        await begun.wait()
        # Its listener is closed, and its call goes on.
        stopping = asyncio.create_task(first.server.stop(60))
        await poll(lambda: _is_disconnected(client), 20.0)
        second = await start(FakeScheduler(), address, _security(new))
        _put(new, tmp_path)
        assert (await client.get_model()).name == "fake"
        fake.hold.set()
        assert list((await generating).token_ids) == expected_tokens(PROMPT, 7, 3)
        assert len(fake.requests) == 1
        await stopping
    await second.server.stop(None)


async def test_client_keeps_its_connection_when_files_change(
    fake: FakeScheduler, old: Certificates, new: Certificates, tmp_path: Path
) -> None:
    running = await start(fake, security=_security(old))
    address = f"127.0.0.1:{running.port}"
    async with AsyncClient(address, ClientConfig(tls=_put(old, tmp_path))) as client:
        await client.get_model()
        _put(new, tmp_path)
        assert (await client.get_model()).name == "fake"
    await running.server.stop(None)


@pytest.mark.parametrize(
    ("address", "config", "num_warnings"),
    [
        ("elsewhere.invalid:1", ClientConfig(api_key=KEY), 1),
        ("127.0.0.1:1", ClientConfig(api_key=KEY), 0),
        ("elsewhere.invalid:2", ClientConfig(), 0),
        ("elsewhere.invalid:3", ClientConfig(api_key=KEY, tls=TlsFiles()), 0),
    ],
)
async def test_key_in_plain_text_is_warned_of_once(
    address: str, config: ClientConfig, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with AsyncClient(address, config):
                pass
    warnings = [text for text in caplog.messages if text.startswith("credential_in_plain_text")]
    assert len(warnings) == num_warnings
    assert all(f"address={address}" in text and KEY not in text for text in warnings)
