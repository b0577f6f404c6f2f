"""The configuration of the scheduler process: what its addresses are protected by."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import SchedulerServiceConfig
from splitserve_options import options
from splitserve_rpc.security import Security, SecurityUnusable
from tests.support.security.cluster import Certificates

ADDRESS = "0.0.0.0:50050"
ONE_ADDRESS = (f"--listen={ADDRESS}", f"--cluster-listen={ADDRESS}")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def _security(*argv: str) -> Security:
    return SchedulerServiceConfig.from_options(options.parse("scheduler", argv, {})).security


def test_authority_of_the_cluster_asks_clients_too_when_there_is_one_address(
    certificates: Certificates,
) -> None:
    security = _security(*ONE_ADDRESS, *certificates.flags("scheduler"))
    assert security.client_tls is security.identity.tls
    assert security.protects_clients


@pytest.mark.parametrize("addresses", [ONE_ADDRESS, ("--cluster-listen=127.0.0.1:50051",)])
def test_authority_of_clients_is_refused_when_there_is_one_address(
    certificates: Certificates, addresses: tuple[str, ...]
) -> None:
    client_ca = f"--tls-client-ca={certificates.files('scheduler').ca}"
    with pytest.raises(SecurityUnusable, match="--tls-client-ca goes with a --cluster-listen"):
        _security(*addresses, *certificates.flags("scheduler"), client_ca)


@pytest.mark.parametrize("client_ca", [False, True])
def test_clients_are_asked_by_their_own_authority_when_there_are_two_addresses(
    certificates: Certificates, tmp_path: Path, client_ca: bool
) -> None:
    ca = Certificates.make(tmp_path).files("scheduler").ca
    flags = [f"--tls-client-ca={ca}"] if client_ca else []
    security = _security(*certificates.flags("scheduler"), *flags)
    assert security.client_tls is not None
    assert security.client_tls.files.ca == (ca if client_ca else None)


def test_one_address_is_refused_when_clients_need_no_certificate_there(
    certificates: Certificates, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of all of them")
    files = certificates.files("scheduler")
    encrypted = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    with pytest.raises(SecurityUnusable, match=f"--listen {ADDRESS}: others can reach it"):
        _security(*ONE_ADDRESS, *encrypted, f"--cluster-token-file={token}")


def test_clients_may_reach_it_when_they_need_a_key_and_nobody_overhears_it(
    certificates: Certificates,
) -> None:
    files = certificates.files("scheduler")
    encrypted = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    assert _security("--listen=0.0.0.0:50051", *encrypted, "--api-keys=k").client_tls is not None
    for flags in (encrypted, ("--api-keys=k",)):
        with pytest.raises(SecurityUnusable, match=r"--listen 0\.0\.0\.0:50051: others can reach"):
            _security("--listen=0.0.0.0:50051", *flags)


def test_executors_are_not_known_by_keys_of_clients(certificates: Certificates) -> None:
    files = certificates.files("scheduler")
    encrypted = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    with pytest.raises(SecurityUnusable, match="--cluster-listen"):
        _security(f"--cluster-listen={ADDRESS}", *encrypted, "--api-keys=k")
