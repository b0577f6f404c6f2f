"""Checks of the options of `splitserve serve`, and addresses of its live page."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from splitserve_cli import serve
from splitserve_cli.serve_config import (
    CannotServe,
    check_callers,
    check_draft_model,
    check_http,
    check_loopback,
    check_model,
    on_gpus_of_their_own,
    reachable_address,
)
from splitserve_options import options
from tests.support.processes.addresses import reserve_address

TLS = ("--http-tls-cert=a.crt", "--http-tls-key=a.key")


@pytest.mark.parametrize("listen", ["0.0.0.0:7", "127.0.0.1:7"])
def test_reachable_address_is_local_when_the_server_listens_everywhere(listen: str) -> None:
    assert reachable_address(listen) == "127.0.0.1:7"


def test_services_get_directories_of_caches_but_no_options_from_the_environment() -> None:
    caches = {"SPLITSERVE_KERNEL_CACHE": "/k", "SPLITSERVE_TRIAL_CACHE": "off"}
    environ = {"PATH": "/bin", "SPLITSERVE_LISTEN": "0.0.0.0:7", **caches}
    assert serve.environ_of_children(environ) == {"PATH": "/bin", **caches}


def test_each_executor_gets_its_own_gpu() -> None:
    indexes = []
    for flags in on_gpus_of_their_own(["--device=cuda", "--dtype=float16"], 3):
        values = options.parse("executor", flags, {})
        assert (values["device"], values["dtype"]) == ("cuda", "float16")
        assert values["host_executors"] == 3
        indexes.append(values["device_index"])
    assert indexes == [0, 1, 2]


def test_check_model_raises_when_the_path_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    for name, message in [
        ("missing", "no such directory"),
        ("file", "not a directory"),
        ("empty", "config.json is missing"),
    ]:
        with pytest.raises(CannotServe, match=message):
            check_model(str(tmp_path / name))


def test_check_model_accepts_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "mmproj-model.gguf").touch()

    check_model(str(tmp_path / "model.gguf"))
    check_model(str(tmp_path))
    (tmp_path / "other.gguf").touch()
    with pytest.raises(CannotServe, match=r"2 GGUF models \(model\.gguf, other\.gguf\)"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("model", ["bundled", "some-org/some-model", "gpt2"])
def test_check_model_accepts_what_may_be_a_model(model: str) -> None:
    check_model(model)


@pytest.mark.parametrize("model", ["./missing", "../missing", "~/missing", "a/b/c", "a b"])
def test_check_model_raises_when_it_can_only_be_a_path(model: str) -> None:
    with pytest.raises(CannotServe, match="no such directory"):
        check_model(model)
    with pytest.raises(CannotServe, match=r"--draft-model .*no such directory"):
        check_model(model, "draft-model")


@pytest.mark.parametrize("address", [None, "127.0.0.1:7", "[::1]:7", "localhost:7", "127.9.9.9:7"])
def test_addresses_of_this_machine_are_taken(address: str | None) -> None:
    check_loopback("listen", address)


@pytest.mark.parametrize("address", ["0.0.0.0:7", "[::]:7", "10.0.0.1:7", "example.org:7"])
def test_addresses_that_others_reach_are_refused(address: str) -> None:
    with pytest.raises(CannotServe, match=re.escape(f"--listen {address}: other machines")):
        check_loopback("listen", address)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ((), "--http-tls-cert and --http-tls-key it is not encrypted, and without --gateway-key"),
        (("--no-http",), None),
        (TLS, "--gateway-key-file or --http-tls-client-ca it does not authenticate callers"),
        (("--gateway-key-file=key",), "--http-tls-cert and --http-tls-key it is not encrypted"),
        ((*TLS, "--gateway-key-file=key"), None),
        ((*TLS, "--http-tls-client-ca=ca.crt"), None),
    ],
)
def test_public_http_is_taken_when_encrypted_with_callers(
    flags: tuple[str, ...], missing: str | None
) -> None:
    values = options.parse("serve", ["--http=0.0.0.0:7", *flags], {})
    if missing is None:
        check_http(values)
    else:
        said = f"--http 0.0.0.0:7: other machines can reach it, and without {missing}"
        with pytest.raises(CannotServe, match=re.escape(said)):
            check_http(values)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), None),
        (("--api-keys=keys.json", "--gateway-key-file=key"), None),
        (("--api-keys=keys.json", "--no-http"), None),
        (("--api-keys=keys.json",), "the gateway needs a key of its own"),
        (("--jwt-issuer=https://i", "--jwt-audience=a"), "the gateway needs a key of its own"),
        (("--gateway-key-file=key",), "--gateway-key-file needs --api-keys or --jwt-issuer"),
    ],
)
def test_scheduler_and_gateway_know_callers_both_or_neither(
    flags: tuple[str, ...], problem: str | None
) -> None:
    values = options.parse("serve", flags, {})
    if problem is None:
        check_callers(values)
    else:
        with pytest.raises(CannotServe, match=problem):
            check_callers(values)


def test_draft_model_is_refused_when_steps_bring_one_token() -> None:
    flags = ("--draft-model=bundled", "--max-run-ahead=1")
    with pytest.raises(CannotServe, match=r"--draft-model bundled .*--max-run-ahead 1: .* 2 or"):
        check_draft_model(options.parse("serve", flags, {}))


@pytest.mark.parametrize(
    "flags",
    [(), ("--max-run-ahead=1",), ("--draft-model=bundled", "--max-run-ahead=2")],
)
def test_draft_model_is_accepted_when_useful_or_absent(
    flags: tuple[str, ...],
) -> None:
    check_draft_model(options.parse("serve", flags, {}))


def test_draft_model_is_refused_when_it_is_no_checkpoint(tmp_path: Path) -> None:
    values = options.parse("serve", (f"--draft-model={tmp_path}",), {})
    with pytest.raises(CannotServe, match="--draft-model"):
        check_draft_model(values)


def test_live_page_has_its_own_address_when_concurrent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = reserve_address()
    monkeypatch.setattr(serve, "_LIVE", usual)
    with ExitStack() as stack:
        # None of their gateways has begun.
        found = [serve.claim_live(None) for _ in range(3)]
        sockets = [each.listening for each in found if each.listening is not None]
        for each in sockets:
            stack.enter_context(closing(each))
        assert len(sockets) == 3
        assert found[0].address == usual
        assert len({each.address for each in found}) == 3
        assert found[1].flags == [
            f"--live-listen={found[1].address}",
            f"--live-socket={sockets[1].fileno()}",
        ]


def test_live_page_is_where_it_is_said() -> None:
    address = reserve_address()
    live = serve.claim_live(address)
    assert live.flags == [f"--live-listen={address}"]
