"""Tests callers by API keys: who is known, and what others are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.callers import NO_LIMITS, Authenticator, Caller, Scope, read_key_file
from splitserve_common import WatchedFiles
from splitserve_contract import DomainError
from splitserve_keys import ApiKey, KeyEntry, change_keys

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))
NOW = datetime(2027, 1, 31, tzinfo=UTC)
KEY = ApiKey.draw()
ENTRY = KeyEntry.of(KEY, "a", frozenset({Scope.GENERATE, Scope.TENANTS}), NOW)

T = TypeVar("T")


@dataclass
class Clock:
    now: datetime = NOW

    def __call__(self) -> float:
        return self.now.timestamp()


def _file(folder: Path, *entries: KeyEntry) -> Path:
    path = folder / "keys.json"
    change_keys(path, lambda keys: {entry.key_id: entry for entry in entries})
    return path


def _watched(path: Path, read: Callable[[Path], T]) -> WatchedFiles[T]:
    return WatchedFiles("callers_file", [path], lambda: read(path))


def _callers(folder: Path, *entries: KeyEntry, clock: Clock | None = None) -> Authenticator:
    keys = _watched(_file(folder, *entries), read_key_file)
    return Authenticator(keys, None, now_s=clock or Clock())


@pytest.fixture(scope="module")
def module_callers(tmp_path_factory: pytest.TempPathFactory) -> Authenticator:
    return _callers(tmp_path_factory.mktemp("keys"), ENTRY)


def _refusal(callers: Authenticator, credential: str) -> str:
    with pytest.raises(DomainError) as raised:
        callers.identify(credential)
    assert raised.value.reason == "CALLER_UNKNOWN"
    return raised.value.message


def test_caller_is_who_the_key_is_of(tmp_path: Path) -> None:
    callers = _callers(tmp_path, ENTRY)
    assert callers.knows_callers
    assert callers.identify(KEY.text) == Caller(f"key:{KEY.key_id}", "a", ENTRY.scopes)


def test_answer_is_the_same_for_every_wrong_key(tmp_path: Path) -> None:
    revoked, expired = ApiKey.draw(), ApiKey.draw()
    entries = [
        ENTRY,
        replace(ENTRY, key_id=revoked.key_id, sha256=revoked.sha256, revoked=NOW),
        replace(ENTRY, key_id=expired.key_id, sha256=expired.sha256, expires=NOW),
    ]
    callers = _callers(tmp_path, *entries)
    credentials = [
        revoked.text,
        ApiKey.draw().text,
        ApiKey(KEY.key_id, ApiKey.draw().secret).text,
        ApiKey(revoked.key_id, KEY.secret).text,
        ApiKey(expired.key_id, KEY.secret).text,
        KEY.text[:-1],
        KEY.text + "x",
        KEY.text.upper(),
        KEY.secret,
        ENTRY.sha256,
        "x" * 8193,
        KEY.text + " " * 9000,
        "é",
    ]
    assert {_refusal(callers, text) for text in credentials} == {"the credential is not valid"}


def test_answer_says_that_one_is_needed_when_none_was_given(tmp_path: Path) -> None:
    problem = "a credential is required"
    assert _refusal(_callers(tmp_path, ENTRY), "") == problem


def test_key_is_valid_until_it_expires(tmp_path: Path) -> None:
    clock = Clock()
    entry = replace(ENTRY, expires=NOW + timedelta(days=1))
    callers = _callers(tmp_path, entry, clock=clock)
    assert callers.identify(KEY.text).tenant == "a"
    clock.now += timedelta(days=1)
    assert _refusal(callers, KEY.text) == "the credential has expired"


def test_nobody_is_known_without_a_file_of_keys() -> None:
    assert _refusal(Authenticator(None, None), KEY.text) == "the credential is not valid"


@settings(max_examples=NUM_EXAMPLES)
@given(
    st.text()
    | st.text(st.characters(max_codepoint=127)).map(lambda text: f"sk-ss-{text}")
    | st.text("abcdef-_019", min_size=43, max_size=43).map(
        lambda text: f"sk-ss-{KEY.key_id}-{text}"
    )
    | st.builds(lambda cut, more: KEY.text[:cut] + more, st.integers(0, 61), st.text())
)
def test_nobody_is_a_caller_who_does_not_have_the_key(
    module_callers: Authenticator, credential: str
) -> None:
    if credential == KEY.text:
        assert module_callers.identify(credential).tenant == "a"
    else:
        # In full, so that no part of a credential is in it.
        needed, invalid = (
            "a credential is required",
            "the credential is not valid",
        )
        assert _refusal(module_callers, credential) == (invalid if credential else needed)


def test_nobody_has_limits_when_there_is_no_file_of_tenants() -> None:
    assert Authenticator(None, None).limits("a") == NO_LIMITS
