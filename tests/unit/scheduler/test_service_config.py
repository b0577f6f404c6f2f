"""Tests the configuration of the scheduler process and of a core."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import (
    CallersConfig,
    SchedulerServiceConfig,
    TokensConfig,
    is_safe_url,
)
from scheduler_service.scheduler import Scheduler
from scheduler_service.scheduler.values import FleetConfig
from splitserve_options import options
from splitserve_rpc import Security, SecurityUnusable
from tests.support.core.driver import make_config
from tests.support.security.cluster import Certificates

ADDRESS = "0.0.0.0:50050"
ONE_ADDRESS = (f"--listen={ADDRESS}", f"--cluster-listen={ADDRESS}")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def _security(*argv: str) -> Security:
    return SchedulerServiceConfig.from_options(options.parse("scheduler", argv, {})).security


def test_one_address_asks_clients_for_cluster_certificates(
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
    with pytest.raises(
        SecurityUnusable, match="--tls-client-ca requires a separate --cluster-listen"
    ):
        _security(*addresses, *certificates.flags("scheduler"), client_ca)


@pytest.mark.parametrize("client_ca", [False, True])
def test_clients_have_an_authority_of_their_own(
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
    with pytest.raises(SecurityUnusable, match=f"--listen {ADDRESS}: other machines can reach it"):
        _security(*ONE_ADDRESS, *encrypted, f"--cluster-token-file={token}")


def test_clients_may_reach_it_with_keys_and_tls(
    certificates: Certificates,
) -> None:
    files = certificates.files("scheduler")
    encrypted = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    assert _security("--listen=0.0.0.0:50051", *encrypted, "--api-keys=k").client_tls is not None
    for flags in (encrypted, ("--api-keys=k",)):
        with pytest.raises(SecurityUnusable, match=r"--listen 0\.0\.0\.0:50051: other machines"):
            _security("--listen=0.0.0.0:50051", *flags)


def test_executors_are_not_known_by_keys_of_clients(certificates: Certificates) -> None:
    files = certificates.files("scheduler")
    encrypted = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    with pytest.raises(SecurityUnusable, match="--cluster-listen"):
        _security(f"--cluster-listen={ADDRESS}", *encrypted, "--api-keys=k")


@pytest.mark.parametrize("weights", ["a=-1", "a=0", "b=2,a=nan", "a=inf", "a", "3"])
def test_tenant_weights_are_refused_when_one_is_none(weights: str) -> None:
    with pytest.raises(ValueError, match="NAME=WEIGHT with a weight above 0"):
        _security(f"--tenant-weights={weights}")


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
def test_keys_of_tokens_are_a_file_or_a_url(flags: list[str], keys: Path | str | None) -> None:
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
    ("url", "is_safe"),
    [
        ("https://a.example", True),
        ("https://a.example:8443/b?c", True),
        ("http://127.0.0.1:80/", True),
        ("http://localhost/", True),
        ("http://[::1]:80/", True),
        ("", False),
        ("a.example", False),
        ("http://a.example", False),
        ("http://localhost.example/", False),
        ("http://127.0.0.1@a.example/", False),
        ("https://user:password@a.example/", False),
        ("http://a.example#127.0.0.1", False),
        ("https://", False),
        ("https:///keys", False),
        ("https://[::1", False),
        ("https://a.example/ b", False),
        ("https://a.example/\n", False),
        ("file:///etc/passwd", False),
        ("ftp://127.0.0.1/", False),
    ],
)
def test_url_is_safe_when_it_is_encrypted_or_of_this_machine(url: str, is_safe: bool) -> None:
    assert is_safe_url(url) == is_safe


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("block_size", 0, 1),
        ("num_device_blocks", 0, 1),
        ("max_num_seqs", 0, 1),
        ("max_num_batched_tokens", 0, 1),
        ("max_model_len", 1, 2),
        ("max_num_waiting", 0, 1),
        ("vocab_size", 0, 1),
        ("num_host_blocks", -1, 0),
        ("block_bytes", -1, 0),
        ("sliding_window", 0, 1),
        ("max_adapters", -1, 0),
        ("num_lookahead_slots", -1, 0),
        ("delay_factor", -0.5, 0.0),
    ],
)
def test_config_names_field_value_and_least_when_out_of_range(
    field: str, value: float, least: float
) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}; allowed: {least} or more"):
        make_config(**{field: value})


def test_scheduler_refuses_when_the_queue_policy_is_unknown() -> None:
    with pytest.raises(ValueError, match="queue_policy is 'lifo'; allowed: fcfs"):
        Scheduler(FleetConfig(queue_policy="lifo"))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_scheduler_refuses_when_a_weight_is_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=r"tenant_weights\['a'\]"):
        Scheduler(FleetConfig(queue_policy="fair", tenant_weights={"a": weight}))


@pytest.mark.parametrize(("max_model_len", "num_blocks", "length"), [(30, 8, 30), (40, 8, 32)])
def test_max_len_is_the_tighter_of_model_and_pool(
    max_model_len: int, num_blocks: int, length: int
) -> None:
    config = make_config(max_model_len=max_model_len, num_device_blocks=num_blocks, block_size=4)
    assert config.max_len == length


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_sequences", "num_encoder_blocks", "window", "length"),
    [
        # Of 10 blocks, what is full of prompt is shared; the others have the rest to themselves.
        (9, 1, 0, None, 40),
        (9, 2, 0, None, 24),
        (8, 2, 0, None, 20),
        (1, 2, 0, None, 20),
        (9, 3, 0, None, 16),
        (9, 11, 0, None, 8),
        # The encoder has blocks of its own.
        (1, 1, 3, None, 28),
        # With a window, the model's length counts as long as the windows fit.
        (1, 1, 0, 9, 200),
        (1, 2, 0, 9, 200),
        (1, 3, 0, 9, 12),
    ],
)
def test_max_len_for_is_what_fits_the_pool(
    num_prompt_tokens: int,
    num_sequences: int,
    num_encoder_blocks: int,
    window: int | None,
    length: int,
) -> None:
    config = make_config(num_device_blocks=10, block_size=4, sliding_window=window)
    assert config.max_len_for(num_prompt_tokens, num_sequences, num_encoder_blocks) == length


def _whole(*argv: str) -> SchedulerServiceConfig:
    return SchedulerServiceConfig.from_options(options.parse("scheduler", argv, {}))


def test_config_has_absolute_paths_of_adapters_when_they_are_given(tmp_path: Path) -> None:
    config = _whole(
        "--adapter=a=/some/a", "--adapter=b=c", "--adapters-file=f", f"--adapters-dir={tmp_path}"
    )
    assert config.adapters == {"a": Path("/some/a"), "b": Path.cwd() / "c"}
    assert (config.adapters_file, config.adapters_dir) == (Path("f"), tmp_path)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--adapter=a=/b,a=/c", "--adapter: the name 'a' is given twice"),
        ("--adapter=a@1=/b", "--adapter: the name 'a@1' has an @"),
        (f"--adapter={'a' * 129}=/b", "--adapter: .* allowed: 1 to 128 printable characters"),
        ("--adapters-dir=/no/such", "--adapters-dir is '/no/such'; allowed: a directory"),
    ],
)
def test_config_is_refused_when_adapters_are_invalid(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _whole(flag)
