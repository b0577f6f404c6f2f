"""Tests callers opened from options: refreshed, and kept while a file cannot be used."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scheduler_service.audit import KeysReloaded
from scheduler_service.callers import (
    ANYBODY,
    AllowAllCallers,
    OpenedCallers,
    TenantLimits,
    open_callers,
)
from scheduler_service.config import CallersConfig, TokensConfig
from splitserve_common import FilesUnusable
from splitserve_contract import DomainError
from tests.support.security.credentials import KeyFile, ListedAudit, id_of
from tests.support.security.issuer import AUDIENCE, Issuer, ec_key, http_server


class Site:
    """A server that has the keys of an issuer; `is_there`: whether it can answer."""

    def __init__(self) -> None:
        self.issuer = Issuer(now=4_000_000_000)
        self.is_there = True

    def answer(self, path: str) -> tuple[int, bytes]:
        return (200, self.issuer.key_set()) if self.is_there else (503, b"")


@pytest.fixture
def site() -> Iterator[tuple[Site, str]]:
    site = Site()
    with http_server(site.answer) as url:
        yield site, url


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path)


def _tokens(site: Site, keys: Path | str | None) -> CallersConfig:
    return CallersConfig(tokens=TokensConfig(site.issuer.name, AUDIENCE, "tenant", keys))


def _is_known(opened: OpenedCallers, credential: str) -> bool:
    try:
        return opened.callers.identify(credential).tenant == "a"
    except DomainError:
        return False


def test_door_is_open_when_nothing_is_said() -> None:
    opened = open_callers(CallersConfig())
    assert isinstance(opened.callers, AllowAllCallers)
    assert opened.callers.identify("anything") is ANYBODY
    assert opened.tenant_weights == {}


async def test_key_is_good_until_it_is_revoked(keys: KeyFile) -> None:
    first = keys.add("a")
    opened = open_callers(CallersConfig(api_keys=keys.path))
    assert _is_known(opened, first)

    second = keys.add("a")
    assert not _is_known(opened, second)
    assert await opened.refresh_files()
    assert _is_known(opened, second)

    keys.revoke(first)
    await opened.refresh_files()
    assert (_is_known(opened, first), _is_known(opened, second)) == (False, True)


async def test_audit_is_told_ids_of_keys_that_are_new_or_others(keys: KeyFile) -> None:
    audit = ListedAudit()
    first = keys.add("a")
    opened = open_callers(CallersConfig(api_keys=keys.path))
    await opened.refresh_files(audit)
    assert audit.events == []

    second = keys.add("a")
    keys.revoke(first)
    await opened.refresh_files(audit)

    assert audit.events == [KeysReloaded((id_of(second),), (), (id_of(first),))]


async def test_callers_stay_known_when_a_file_cannot_be_used(
    keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    file, tenants = keys.path, keys.tenants
    key = keys.add("a")
    tenants.write_text("[tenants.a]\nweight = 3\nmax_sequences = 2\n")
    opened = open_callers(CallersConfig(file, tenants))
    file.write_text("nothing")
    tenants.write_text("[tenants.a]\nweight = 5\n")
    with caplog.at_level(logging.INFO):
        assert await opened.refresh_files()
    assert _is_known(opened, key)
    assert opened.callers.limits("a") == TenantLimits(weight=5)
    assert opened.tenant_weights == {"a": 5}
    assert [message.partition(" ")[0] for message in caplog.messages] == [
        "callers_file_unusable",
        "callers_file_reloaded",
        "callers_reloaded",
    ]
    assert caplog.messages[2] == "callers_reloaded num_keys=1 num_tenants=1 num_token_keys=0"


@pytest.mark.parametrize("name", ["api_keys", "tenants"])
def test_file_is_named_when_it_cannot_be_used_at_the_start(
    name: str, keys: KeyFile, tmp_path: Path
) -> None:
    keys.add("a")
    files = {"api_keys": keys.path, name: tmp_path / "none"}
    with pytest.raises(FilesUnusable, match="none: No such file or directory"):
        open_callers(CallersConfig(files["api_keys"], files.get("tenants")))


async def test_tokens_are_known_by_current_keys_of_a_file(tmp_path: Path) -> None:
    site = Site()
    file = tmp_path / "jwks.json"
    file.write_bytes(site.issuer.key_set())
    opened = open_callers(_tokens(site, file))
    old = site.issuer.token()
    assert _is_known(opened, old)
    site.issuer.keys = {"second": ec_key()}
    file.write_bytes(site.issuer.key_set())
    os.utime(file, ns=(1, 1))
    await opened.refresh_token_keys()
    assert (_is_known(opened, old), _is_known(opened, site.issuer.token("second"))) == (False, True)


async def test_tokens_are_known_by_keys_that_are_fetched(site: tuple[Site, str]) -> None:
    server, url = site
    opened = open_callers(_tokens(server, f"{url}/keys"))
    token = server.issuer.token()
    assert not _is_known(opened, token)
    await opened.refresh_token_keys()
    assert _is_known(opened, token)


async def test_tokens_are_refused_while_the_issuer_is_away(
    site: tuple[Site, str], keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = site
    server.is_there = False
    key = keys.add("a")
    tokens = TokensConfig(server.issuer.name, AUDIENCE, "tenant", f"{url}/keys")
    opened = open_callers(CallersConfig(keys.path, tokens=tokens))
    await opened.refresh_token_keys()
    assert caplog.messages == [f"token_keys_unavailable problem='{url}/keys: HTTP status 503'"]
    assert (_is_known(opened, server.issuer.token()), _is_known(opened, key)) == (False, True)


async def test_fetched_keys_are_refused_when_they_are_none(
    site: tuple[Site, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = site
    server.issuer.keys = {}
    opened = open_callers(_tokens(server, f"{url}/keys"))
    await opened.refresh_token_keys()
    assert "no key for verifying signatures" in caplog.messages[0]


def test_package_is_named_when_tokens_are_asked_for_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("scheduler_service.callers.tok")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "joserfc", None)
    problem = r"--jwt-issuer needs joserfc: pip install 'splitserve\[security\]'"
    with pytest.raises(ValueError, match=problem):
        open_callers(_tokens(Site(), "https://issuer.example/keys"))


class Rounds:
    """A pause that ends when a round is let go."""

    def __init__(self) -> None:
        self.waiting = asyncio.Semaphore(0)
        self.reached = asyncio.Semaphore(0)

    async def __call__(self) -> None:
        self.reached.release()
        await self.waiting.acquire()

    async def next(self) -> None:
        """Both kinds of files have been looked at when it returns."""
        for _ in range(2):
            await self.reached.acquire()
            self.waiting.release()
        for _ in range(2):
            await self.reached.acquire()
        for _ in range(2):
            self.reached.release()


async def test_files_are_looked_at_again_and_again_and_weights_are_told(keys: KeyFile) -> None:
    file, tenants = keys.path, keys.tenants
    keys.add("a")
    tenants.write_text("")
    opened = open_callers(CallersConfig(file, tenants))
    told: list[Mapping[str, float]] = []
    rounds = Rounds()
    task = asyncio.create_task(opened.keep_fresh(told.append, rounds))
    await rounds.next()
    assert told == []
    tenants.write_text("[tenants.a]\nweight = 2\n")
    await rounds.next()
    tenants.write_text("[tenants.a]\nweight = 25\n")
    await rounds.next()
    assert told == [{"a": 2}, {"a": 25}]
    task.cancel()


async def test_files_are_looked_at_again_when_that_failed_once(
    keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    file, tenants = keys.path, keys.tenants
    keys.add("a")
    tenants.write_text("")
    opened = open_callers(CallersConfig(file, tenants))
    told: list[Mapping[str, float]] = []

    def tell(weights: Mapping[str, float]) -> None:
        told.append(weights)
        if len(told) == 1:
            raise ArithmeticError

    rounds = Rounds()
    task = asyncio.create_task(opened.keep_fresh(tell, rounds))
    tenants.write_text("[tenants.a]\nweight = 2\n")
    await rounds.next()
    tenants.write_text("[tenants.a]\nweight = 25\n")
    await rounds.next()
    assert told == [{"a": 2}, {"a": 25}]
    assert "callers_not_refreshed" in caplog.messages
    task.cancel()
