"""What the options say about callers, and which of them exclude or need each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import CallersConfig, TokensConfig, is_safe_url
from splitserve_options import options

ISSUER = "--jwt-issuer=https://issuer.example"
AUDIENCE = "--jwt-audience=splitserve"


def _config(*argv: str) -> CallersConfig:
    return CallersConfig.from_options(options.parse("scheduler", argv, {}))


def test_nobody_is_asked_when_nothing_is_said() -> None:
    assert _config() == CallersConfig()
    assert not _config().knows_callers


def test_callers_are_known_when_there_are_keys_or_an_issuer() -> None:
    assert _config("--api-keys=k").knows_callers
    assert _config(ISSUER, AUDIENCE).knows_callers


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], None),
        (["--jwt-keys=keys.json"], Path("keys.json")),
        (["--jwt-keys=https://issuer.example/keys"], "https://issuer.example/keys"),
        (["--jwt-keys=http://127.0.0.1:8080/keys"], "http://127.0.0.1:8080/keys"),
    ],
)
def test_keys_of_tokens_are_a_file_or_a_url_or_what_the_issuer_says(
    flags: list[str], keys: Path | str | None
) -> None:
    expected = TokensConfig("https://issuer.example", "splitserve", "team", keys)
    assert _config(ISSUER, AUDIENCE, "--jwt-tenant-claim=team", *flags).tokens == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tenants=t"], "--tenants is given without --api-keys and --jwt-issuer"),
        (
            ["--api-keys=k", "--tenants=t", "--tenant-weights=a=2"],
            "--tenant-weights and --tenants exclude each other",
        ),
        ([AUDIENCE], "--jwt-audience is given without --jwt-issuer"),
        (["--jwt-keys=k"], "--jwt-keys is given without --jwt-issuer"),
        ([ISSUER], "--jwt-issuer is given without --jwt-audience"),
        (["--jwt-issuer=issuer", AUDIENCE], "--jwt-issuer is 'issuer'; allowed: https://"),
        (["--jwt-issuer=http://a.example", AUDIENCE], "--jwt-issuer is 'http://a.example'"),
        ([ISSUER, AUDIENCE, "--jwt-keys=http://a.example/"], "--jwt-keys is 'http://a.example/'"),
        ([ISSUER, AUDIENCE, "--jwt-keys=file:///keys"], "--jwt-keys is 'file:///keys'"),
    ],
)
def test_options_are_refused_by_name_when_they_cannot_be_meant(
    flags: list[str], problem: str
) -> None:
    with pytest.raises(ValueError, match=r"^--") as raised:
        _config(*flags)
    assert str(raised.value).startswith(problem)


def test_issuer_may_have_any_name_when_its_keys_are_given() -> None:
    tokens = _config("--jwt-issuer=issuer", AUDIENCE, "--jwt-keys=k").tokens
    assert tokens is not None
    assert tokens.issuer == "issuer"


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example",
        "https://a.example:8443/b?c",
        "http://127.0.0.1:80/",
        "http://localhost/",
        "http://[::1]:80/",
    ],
)
def test_url_is_safe_when_it_is_encrypted_or_of_this_machine(url: str) -> None:
    assert is_safe_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example",
        "http://a.example",
        "http://localhost.example/",
        "http://127.0.0.1@a.example/",
        "https://user:password@a.example/",
        "http://a.example#127.0.0.1",
        "https://",
        "https:///keys",
        "https://[::1",
        "https://a.example/ b",
        "https://a.example/\n",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
    ],
)
def test_url_is_not_safe_when_it_is_anything_else(url: str) -> None:
    assert not is_safe_url(url)
