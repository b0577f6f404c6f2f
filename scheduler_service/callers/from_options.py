"""Builds `Callers` from the options, and keeps its key files, tenants and issuer keys fresh."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from scheduler_service.audit import Audit, KeysReloaded
from scheduler_service.callers.authenticator import Authenticator, read_key_file
from scheduler_service.callers.caller import AllowAllCallers, Caller, Callers
from scheduler_service.callers.issuer_keys import (
    CannotFetch,
    Fetched,
    Refreshed,
    fetch,
    fetch_keys_of,
)
from scheduler_service.callers.tenants_file import Tenants, read_tenants
from scheduler_service.config import CallersConfig, TokensConfig
from splitserve_common import FilesUnusable, WatchedFiles
from splitserve_keys import Keys

if TYPE_CHECKING:
    from scheduler_service.callers.tokens import TokenKeys

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0

T = TypeVar("T")


async def _pause() -> None:
    await asyncio.sleep(_PERIOD_S)


@dataclass(frozen=True, slots=True)
class OpenedCallers:
    """`callers`, and the files and keys that it reads; refreshing these changes its answers."""

    callers: Callers
    keys: WatchedFiles[Keys] | None = None
    tenants: WatchedFiles[Tenants] | None = None
    token_keys: Refreshed[TokenKeys] | None = None

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Weights for the policy `fair`, from the tenants file as it is now."""
        return {} if self.tenants is None else self.tenants.value.weights

    async def refresh_files(self, audit: Audit | None = None) -> bool:
        """Reads changed files again; returns whether any changed. Tells `audit` of changed keys."""
        keys_before = None if self.keys is None else self.keys.value
        refreshed = await asyncio.to_thread(
            lambda: [file.refresh() for file in (self.keys, self.tenants) if file is not None]
        )
        if any(refreshed):
            self._log_reloaded()
        if audit is not None and self.keys is not None and keys_before is not None:
            _tell_changes(audit, keys_before, self.keys.value)
        return any(refreshed)

    async def refresh_token_keys(self) -> None:
        """Reads or fetches the issuer's keys again, if they are due."""
        if self.token_keys is not None and await asyncio.to_thread(self.token_keys.refresh):
            self._log_reloaded()

    async def keep_fresh(
        self,
        weigh_tenants: Callable[[Mapping[str, float]], None],
        pause: Callable[[], Awaitable[None]] = _pause,
        audit: Audit | None = None,
    ) -> None:
        """Refreshes files and issuer keys until cancelled.

        Both run independently, because an issuer may be slow. `weigh_tenants` gets the weights
        whenever they may have changed, `audit` the changes of API keys.
        """

        async def files() -> None:
            if await self.refresh_files(audit):
                weigh_tenants(self.tenant_weights)

        await asyncio.gather(
            _again_and_again(files, pause), _again_and_again(self.refresh_token_keys, pause)
        )

    def _log_reloaded(self) -> None:
        _log.info(
            "callers_reloaded num_keys=%d num_tenants=%d num_token_keys=%d",
            0 if self.keys is None else len(self.keys.value),
            0 if self.tenants is None else len(self.tenants.value.named),
            0 if self.token_keys is None else len(self.token_keys.value.keys),
        )


def _tell_changes(audit: Audit, before: Keys, after: Keys) -> None:
    if before is after:
        return
    both = before.keys() & after.keys()
    event = KeysReloaded(
        tuple(sorted(after.keys() - before.keys())),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(key_id for key_id in both if before[key_id] != after[key_id])),
    )
    audit.record(event)


def open_callers(config: CallersConfig) -> OpenedCallers:
    """Opens all that `config` names.

    Raises FilesUnusable, and ValueError if a package is missing; messages are one line for people.
    """
    if config.api_keys is None and config.tokens is None:
        return OpenedCallers(AllowAllCallers())
    keys = None if config.api_keys is None else _watched("api-keys", config.api_keys, read_key_file)
    tenants = None if config.tenants is None else _watched("tenants", config.tenants, read_tenants)
    token_keys, identify = (None, None) if config.tokens is None else _tokens(config.tokens)
    return OpenedCallers(Authenticator(keys, tenants, identify), keys, tenants, token_keys)


def _watched(option: str, path: Path, read: Callable[[Path], T]) -> WatchedFiles[T]:
    """Opens a file that is read again when it changes. Raises FilesUnusable, naming the option."""
    try:
        return WatchedFiles("callers_file", [path], lambda: read(path))
    except FilesUnusable as error:
        raise FilesUnusable(f"--{option} {error}") from error


def _tokens(config: TokensConfig) -> tuple[Refreshed[TokenKeys], Callable[[str], Caller]]:
    try:
        from scheduler_service.callers.tokens import (
            NO_TOKEN_KEYS,
            TokenRules,
            TokenVerifier,
            parse_token_keys,
            read_token_keys,
        )
    except ImportError as error:
        problem = "--jwt-issuer needs joserfc: pip install 'splitserve[security]'"
        raise ValueError(problem) from error
    rules = TokenRules(config.issuer, config.audience, config.tenant_claim)
    if isinstance(config.keys, Path):
        file = _watched("jwt-keys", config.keys, read_token_keys)
        return file, TokenVerifier(rules, file).identify
    keys_url = config.keys

    def fetch_keys() -> TokenKeys:
        content = fetch_keys_of(config.issuer) if keys_url is None else fetch(keys_url)
        try:
            return parse_token_keys(content)
        except ValueError as error:
            raise CannotFetch(f"keys of {config.issuer}: {error}") from error

    fetched = Fetched(NO_TOKEN_KEYS, fetch_keys)
    return fetched, TokenVerifier(rules, fetched, fetched.want).identify


async def _again_and_again(
    refresh: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await pause()
        try:
            await refresh()
        except Exception:
            # Keep the old values and go on: without refreshes, revoked keys would stay valid.
            _log.exception("callers_not_refreshed")
