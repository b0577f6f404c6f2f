from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerServiceConfig
from splitserve_gateway.config import GatewayConfig
from splitserve_options import Command, options
from splitserve_rpc import SecurityUnusable
from tests.support.security.cluster import Certificates

READ = {
    "scheduler": SchedulerServiceConfig.from_options,
    "executor": ExecutorConfig.from_options,
    "gateway": GatewayConfig.from_options,
}
OPEN = {"scheduler": "cluster-listen", "executor": "listen", "gateway": "http"}


def read(command: Command, *flags: str) -> object:
    return READ[command](options.resolve(command, flags, {}))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("command", READ)
def test_nothing_listens_where_others_reach_it_unless_told_to(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    flag = f"--{OPEN[command]}=0.0.0.0:0"
    with pytest.raises(SecurityUnusable, match=re.escape(f"--{OPEN[command]} 0.0.0.0:0")):
        read(command, flag)
    with caplog.at_level(logging.WARNING):
        read(command, flag, "--insecure")
    assert f"listening_insecurely option={OPEN[command]} address=0.0.0.0:0" in caplog.text


@pytest.mark.parametrize("command", ["scheduler", "executor"])
def test_roles_and_encryption_protect_what_others_reach(
    command: Command, certificates: Certificates
) -> None:
    listen = f"--{OPEN[command]}=0.0.0.0:0"
    flags = certificates.flags(command)
    read(command, listen, *flags)
    # Encrypted, but open to everybody.
    with pytest.raises(SecurityUnusable):
        read(command, listen, *flags[:2])


@pytest.mark.parametrize(
    ("command", "other"), [("scheduler", "executor"), ("executor", "operator")]
)
def test_certificate_of_another_role_is_refused_where_roles_are_checked(
    command: Command, other: str, certificates: Certificates
) -> None:
    flags = certificates.flags(other)
    needed = f"{other}.crt: .*; required: {command}.splitserve.internal$"
    with pytest.raises(SecurityUnusable, match=needed):
        read(command, *flags)
    # Nobody looks at the role.
    read(command, *flags[:2])


def test_token_alone_protects_nothing_that_others_reach(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("overheard by whoever listens")
    with pytest.raises(SecurityUnusable):
        read("executor", "--listen=0.0.0.0:0", f"--cluster-token-file={tmp_path / 'token'}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("short", "has 5 characters; allowed: 16 to 1024"),
        ("ä" * 20, "it is not ASCII"),
        ("two lines\nare not one", "all printable"),
    ],
)
def test_token_is_refused_by_name(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SecurityUnusable, match=re.escape(f"--cluster-token-file {path}: ")) as told:
        read("executor", f"--cluster-token-file={path}")
    assert problem in str(told.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tls-cert=a"], "--tls-cert is given without --tls-key"),
        (["--tls-key=a"], "--tls-key is given without --tls-cert"),
        (["--tls-ca=a"], "--tls-ca is given without --tls-cert and --tls-key"),
        (["--tls-client-ca=a"], "--tls-client-ca is given without --tls-cert and --tls-key"),
        (["--tls-cert=/no/a", "--tls-key=/no/b"], "--tls-cert /no/a: No such file or directory"),
    ],
)
def test_files_that_do_not_make_sense_together_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(SecurityUnusable, match=f"^{re.escape(problem)}$"):
        read("scheduler", *flags)
