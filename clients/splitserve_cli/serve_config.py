"""Configuration of `splitserve serve`, and its checks before slow work starts."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitserve_adapters import AdapterInvalid
from splitserve_cli.checks.adapters import check_adapter, named_adapters
from splitserve_cli.extras import missing_modules
from splitserve_common import exposed, is_loopback, missing_for_http
from splitserve_options import BUNDLED_MODEL, NoCheckpoint, Value, find_checkpoint

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class HttpTls(enum.Enum):
    """Encryption of the gateway. `MUTUAL`: clients need certificates too."""

    NONE = enum.auto()
    SERVER = enum.auto()
    MUTUAL = enum.auto()


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Configuration of the supervisor.

    `address` and `http`: addresses of scheduler and gateway as reachable from this machine; `http`
    is None without a gateway. `started_at`: monotonic seconds. `needs_key`: whether callers need
    credentials. `live`: address of the live page, None without it. `operators`: address for
    operators, None if it equals `address`.
    """

    address: str
    http: str | None
    model: str
    with_demo: bool
    drain_timeout_s: float
    started_at: float
    http_tls: HttpTls = HttpTls.NONE
    needs_key: bool = False
    live: str | None = None
    operators: str | None = None


class CannotServe(Exception):
    """Reports that serving is impossible; the message is one line for users."""


def check_loopback(
    option: str,
    address: Value,
    problem: str = "not all connections are encrypted and authenticated",
) -> None:
    """Raises CannotServe if other machines could reach `address`. `problem`: why they must not."""
    if address is not None and not is_loopback(str(address)):
        raise CannotServe(exposed(option, address, problem))


def check_http(values: Mapping[str, Value], option: str = "http") -> None:
    """Raises CannotServe if other machines could reach a gateway that is not secured.

    A gateway is secured if it uses TLS and identifies its clients.

    `option`: name of the address option.
    """
    tls = http_tls(values)
    missing = missing_for_http(
        is_encrypted=tls is not HttpTls.NONE,
        knows_clients=tls is HttpTls.MUTUAL or values["gateway_key_file"] is not None,
    )
    if missing and not values["no_http"]:
        check_loopback(option, values[option.replace("-", "_")], missing)


def check_callers(values: Mapping[str, Value]) -> None:
    """Raises CannotServe if scheduler and gateway disagree on whether callers need credentials."""
    has_gateway_key = values["gateway_key_file"] is not None
    if values["no_http"] or needs_key(values) == has_gateway_key:
        return
    if has_gateway_key:
        raise CannotServe(
            "--gateway-key-file needs --api-keys or --jwt-issuer: without them no key is required"
        )
    raise CannotServe(
        "callers need credentials, so the gateway needs a key of its own: splitserve keys add FILE "
        "--tenant gateways --scope gateway > KEY, and --gateway-key-file KEY; or --no-http"
    )


def needs_key(values: Mapping[str, Value]) -> bool:
    """Returns whether the scheduler requires credentials of callers."""
    return values["api_keys"] is not None or values["jwt_issuer"] is not None


def http_tls(values: Mapping[str, Value]) -> HttpTls:
    """Returns the encryption of the gateway that the options select."""
    if values["http_tls_cert"] is None:
        return HttpTls.NONE
    return HttpTls.SERVER if values["http_tls_client_ca"] is None else HttpTls.MUTUAL


def check_model(model: str, option: str = "model") -> None:
    """Raises CannotServe if `model` is obviously no checkpoint; the executor checks it in full.

    `option`: name of the option that gave it.
    """
    missing = missing_modules("executor")
    if missing:
        raise CannotServe(f"executors need {missing}: pip install 'splitserve[executor]'")
    if model == BUNDLED_MODEL:
        return
    try:
        find_checkpoint(model)
    except NoCheckpoint as error:
        raise CannotServe(f"--{option} {error}") from error


def check_draft_model(values: Mapping[str, Value]) -> None:
    """Raises CannotServe if the draft model is no checkpoint, or could not be used."""
    draft_model, max_run_ahead = values["draft_model"], values["max_run_ahead"]
    if draft_model is None:
        return
    check_model(str(draft_model), "draft-model")
    if max_run_ahead == 1:
        raise CannotServe(
            f"--draft-model {draft_model} has no effect with --max-run-ahead {max_run_ahead}:"
            " accepted draft tokens are tokens of a step beyond the first; allowed with"
            " --draft-model: 2 or more"
        )


def check_adapters(values: Mapping[str, Value]) -> None:
    """Raises CannotServe if an adapter that the options name is none, or none can be loaded."""
    try:
        adapters = named_adapters(values)
        for path in adapters.values():
            check_adapter(path)
    except AdapterInvalid as error:
        raise CannotServe(f"adapters: {error}") from error
    if (adapters or values["adapters_dir"] is not None) and values["max_adapters"] == 0:
        raise CannotServe(
            "adapters are given with --max-adapters 0; allowed with adapters: 1 or more"
        )


def check_gateway() -> None:
    """Raises CannotServe if the gateway cannot run here."""
    missing = missing_modules("gateway")
    if missing:
        raise CannotServe(
            f"the gateway needs {missing}: pip install 'splitserve[gateway]', or --no-http"
        )


def on_gpus_of_their_own(flags: Sequence[str], num_executors: int) -> list[list[str]]:
    """Returns the flags of each executor. Only executors find out how many GPUs there are.

    All executors share the memory of this machine.
    """
    shared = [*flags, f"--host-executors={num_executors}"]
    return [[*shared, f"--device-index={index}"] for index in range(num_executors)]


def metrics_flags(values: Mapping[str, Value]) -> Iterator[list[str]]:
    """Yields the metrics flag of each process in turn; each gets an address of its own."""
    listen = values["metrics_listen"]
    if listen is None:
        yield from itertools.repeat([])
    host, _, port = str(listen).rpartition(":")
    for each in itertools.count(int(port)):
        yield [f"--metrics-listen={host}:{each if int(port) else 0}"]


def reachable_address(listen: str) -> str:
    """Returns the address under which this machine reaches a server that listens on `listen`."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
