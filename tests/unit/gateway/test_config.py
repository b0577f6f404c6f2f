"""Combinations of the gateway's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve_common import FilesUnusable
from splitserve_gateway.config import GatewayConfig
from splitserve_options import options
from splitserve_rpc import SecurityUnusable, TlsFiles

TLS = ("--http-tls-cert=a.crt", "--http-tls-key=a.key")
CLIENT_CA = "--http-tls-client-ca=ca.crt"
PUBLIC = "--http=0.0.0.0:8000"
EXPOSED = "^--http 0.0.0.0:8000: other machines can reach it, and "
NOT_ENCRYPTED = "without --http-tls-cert and --http-tls-key it is not encrypted"
KNOWS_NOBODY = "without --gateway-key-file or --http-tls-client-ca it does not authenticate callers"
KEY = "--gateway-key-file=key"
OTHER_MACHINE = "--schedulers=127.0.0.1:50051,scheduler:50051"


def config(*flags: str) -> GatewayConfig:
    return GatewayConfig.from_options(options.parse("gateway", flags, {}))


def test_http_is_plain_when_no_certificate_is_given() -> None:
    assert config().http_tls is None
    assert config(*TLS).http_tls == TlsFiles(Path("a.crt"), Path("a.key"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (TLS[:1], "--http-tls-cert is given without --http-tls-key"),
        (TLS[1:], "--http-tls-key is given without --http-tls-cert"),
        ((CLIENT_CA,), "--http-tls-client-ca is given without"),
        ((PUBLIC,), f"{EXPOSED}{NOT_ENCRYPTED}, and {KNOWS_NOBODY} "),
        ((PUBLIC, *TLS), f"{EXPOSED}{KNOWS_NOBODY} "),
        ((PUBLIC, "--gateway-key-file=key"), f"{EXPOSED}{NOT_ENCRYPTED} "),
        (("--tls-cert=a.crt",), "--tls-cert is given without --tls-key"),
        ((KEY, "--schedulers=dns:here:1"), "--schedulers dns:here:1: may be on another machine"),
        ((KEY, OTHER_MACHINE), "--schedulers scheduler:50051: is on another machine, and without"),
    ],
)
def test_options_are_refused_that_cannot_be_meant(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(SecurityUnusable, match=problem):
        config(*flags)


def test_chat_template_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")

    assert config().chat_template is None
    assert config(f"--chat-template={file}").chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"{% if %}", "--chat-template .*chat.jinja: "), (b"\xff", "utf-8")],
)
def test_chat_template_is_refused_when_its_file_is_unusable(
    content: bytes | None, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(FilesUnusable, match=problem):
        config(f"--chat-template={file}")


def test_schedulers_are_reached_over_tls_when_configured() -> None:
    assert config().scheduler_tls is None
    assert config("--tls-ca=ca.crt").scheduler_tls == TlsFiles(ca=Path("ca.crt"))


@pytest.mark.parametrize(
    "flags",
    [(PUBLIC, *TLS, CLIENT_CA), (PUBLIC, *TLS, "--gateway-key-file=key"), (PUBLIC, "--insecure")],
)
def test_public_address_is_taken_when_clients_are_known(flags: tuple[str, ...]) -> None:
    assert config(*flags).http == "0.0.0.0:8000"


def test_the_callers_key_is_not_taken_for_the_gateways() -> None:
    values = options.parse("gateway", [], {"SPLITSERVE_API_KEY_FILE": "of-a-caller"})
    assert GatewayConfig.from_options(values).gateway_key_file is None


@pytest.mark.parametrize(
    "flags",
    [
        (KEY, OTHER_MACHINE, "--tls-ca=ca.crt"),
        (KEY, OTHER_MACHINE, "--insecure"),
        (KEY, "--schedulers=[::1]:1,localhost:2"),
        (OTHER_MACHINE,),
    ],
)
def test_keys_go_to_other_machines_encrypted_or_when_told_to(flags: tuple[str, ...]) -> None:
    assert config(*flags).schedulers
