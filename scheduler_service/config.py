"""Configuration of the scheduler process: callers, limits and policies, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scheduler_service.scheduler.values import (
    BatchPolicyName,
    FleetConfig,
    PolicyConfig,
    PreemptionMode,
    Speculation,
)
from splitserve_adapters import AdapterInvalid, parse_adapters
from splitserve_common import AddressRules, is_loopback
from splitserve_metrics import MetricsAddress
from splitserve_rpc import Role, Security, SecurityUnusable, check_exposure
from splitserve_tracing import TraceConfig

# -- Options about callers -------------------------------------------------------------------------

SAFE_URLS = "https://..., or http:// to a loopback address"


@dataclass(frozen=True, slots=True)
class TokensConfig:
    """Rules for the tokens (JWT) of one issuer.

    `keys`: a file with a JWK set, its URL, or None to find the set by OpenID Connect Discovery.
    """

    issuer: str
    audience: str
    tenant_claim: str
    keys: Path | str | None = None


@dataclass(frozen=True, slots=True)
class CallersConfig:
    """Credentials by which callers are identified, and the file with limits of their tenants.

    Without `api_keys` and `tokens`, callers need no credential.
    """

    api_keys: Path | None = None
    tenants: Path | None = None
    tokens: TokensConfig | None = None

    @property
    def knows_callers(self) -> bool:
        """Whether callers need a credential."""
        return self.api_keys is not None or self.tokens is not None

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> CallersConfig:
        """Makes the configuration from parsed options.

        Raises ValueError for options that contradict each other.
        """
        config = cls(_path(values["api_keys"]), _path(values["tenants"]), _tokens(values))
        if config.tenants is not None and not config.knows_callers:
            raise ValueError(
                "--tenants is given without --api-keys and --jwt-issuer: "
                "unauthenticated callers could choose any tenant"
            )
        if config.tenants is not None and values["tenant_weights"] is not None:
            raise ValueError(
                "--tenant-weights and --tenants exclude each other; set weights in the tenants file"
            )
        return config


def is_safe_url(url: str) -> bool:
    """Returns whether the host in `url` is authenticated: https, or http to this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    # A URL is logged; a password in it would be logged, too.
    if not host or "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(f"{host}:0"))


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _tokens(values: Mapping[str, Any]) -> TokensConfig | None:
    issuer, audience, keys = (values[name] for name in ("jwt_issuer", "jwt_audience", "jwt_keys"))
    if issuer is None:
        for name in ("jwt-audience", "jwt-keys"):
            if values[name.replace("-", "_")] is not None:
                raise ValueError(f"--{name} is given without --jwt-issuer")
        return None
    if audience is None:
        # Without an audience, a token for any other service of the issuer would be accepted.
        raise ValueError("--jwt-issuer is given without --jwt-audience")
    if keys is None and not is_safe_url(issuer):
        raise ValueError(
            f"--jwt-issuer is {issuer!r}; allowed: {SAFE_URLS}, or any URL with --jwt-keys"
        )
    if keys is not None and "://" in keys and not is_safe_url(keys):
        raise ValueError(f"--jwt-keys is {keys!r}; allowed: a file, {SAFE_URLS}")
    is_file = keys is not None and "://" not in keys
    return TokensConfig(
        issuer, audience, values["jwt_tenant_claim"], Path(keys) if is_file else keys
    )


# -- Options of the scheduler process --------------------------------------------------------------

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Limits of steps and queues, policies, and time limits of executors (in seconds).

    A field with the name of an option has the value of that option. `max_model_len` None: the
    limit of the model.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_num_waiting: int = 1024
    pipeline_depth: int = 2
    executor_return_s: float = 300.0
    reconnect_timeout_s: float = 2.0
    step_timeout_s: float = 300.0
    step_patience_s: float = 3.0
    max_executor_losses: int = 2
    max_adapters: int = 4096
    max_unread_bytes: int = 16 * _MIB
    policies: PolicyConfig = field(default_factory=PolicyConfig)

    @property
    def fleet(self) -> FleetConfig:
        """Settings of the waiting queue, of quarantine, and of executors expected to return."""
        return FleetConfig(
            queue_policy=self.policies.queue_policy,
            tenant_weights=self.policies.tenant_weights,
            max_num_waiting=self.max_num_waiting,
            max_executor_losses=self.max_executor_losses,
            executor_return_s=self.executor_return_s,
        )


@dataclass(frozen=True, slots=True)
class SchedulerServiceConfig:
    """Configuration of the whole scheduler process.

    `journal`: file to record events in, None for no journal. `peers`: the other schedulers, in the
    format of `splitserve_common.scheduler_discovery`. `metrics`, `traces`: None for none.
    `remember_requests`: number of ended requests that Explain remembers; 0: Explain is off.
    `adapters`: folders of LoRA adapters by name. `adapters_file`: file with more of them.
    `adapters_dir`: folder of adapters that requests may name.
    """

    listen: str
    cluster_listen: str
    security: Security
    cluster: ClusterConfig
    drain_timeout_s: float
    exit_on_stdin_eof: bool
    executor_addresses: AddressRules = field(default_factory=AddressRules)
    journal: str | None = None
    journal_max_bytes: int = 256 * _MIB
    callers: CallersConfig = field(default_factory=CallersConfig)
    audit_log: str | None = None
    no_operator_token: bool = False
    peers: str | None = None
    metrics: MetricsAddress | None = None
    remember_requests: int = 0
    traces: TraceConfig | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapters_file: Path | None = None
    adapters_dir: Path | None = None

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> SchedulerServiceConfig:
        """Makes the configuration from parsed options; types and ranges are already checked.

        Raises ValueError and SecurityUnusable.
        """
        callers = CallersConfig.from_options(values)
        named = {
            item.name: values[item.name] for item in fields(ClusterConfig) if item.name in values
        }
        cluster = ClusterConfig(
            **named,
            max_adapters=values["max_loras"],
            max_unread_bytes=values["max_unread_mib"] * _MIB,
            policies=_policies(values),
        )
        return cls(
            values["listen"],
            values["cluster_listen"],
            _security(values, knows_callers=callers.knows_callers),
            cluster,
            values["drain_timeout_s"],
            values["exit_on_stdin_eof"],
            _executor_addresses(values["executor_addresses"]),
            values["journal"],
            values["journal_max_mib"] * _MIB,
            callers,
            values["audit_log"],
            values["no_operator_token"],
            values["peers"],
            MetricsAddress.from_options(values),
            values["remember_requests"],
            TraceConfig.from_options(values),
            _adapters(values["adapter"]),
            _path(values["adapters_file"]),
            _adapters_dir(values["adapters_dir"]),
        )


def _security(values: Mapping[str, Any], *, knows_callers: bool) -> Security:
    """Returns the TLS settings for clients and cluster, if the addresses are safe to expose.

    If clients and cluster share one address, the cluster's TLS serves clients, too. Raises
    SecurityUnusable.
    """
    security, insecure = Security.from_options(values, Role.SCHEDULER), values["insecure"]
    if values["listen"] == values["cluster_listen"]:
        if values["tls_client_ca"]:
            raise SecurityUnusable(
                "--tls-client-ca requires a separate --cluster-listen; "
                "if both share one address, --tls-ca verifies the clients"
            )
        security = replace(security, client_tls=security.identity.tls)
    # Callers are identified by certificates, or by credentials if TLS keeps these secret.
    knows_clients = security.protects_clients or (knows_callers and security.client_tls is not None)
    protected = {"listen": knows_clients, "cluster-listen": security.protects_cluster}
    for option, is_protected in protected.items():
        address = values[option.replace("-", "_")]
        check_exposure(option, address, is_protected=is_protected, insecure=insecure)
    return security


def _executor_addresses(text: str | None) -> AddressRules:
    """Parses `--executor-addresses`. Raises ValueError."""
    try:
        return AddressRules() if text is None else AddressRules.parse(text)
    except ValueError as error:
        raise ValueError(f"--executor-addresses: {error}") from error


def _adapters(text: str | None) -> dict[str, Path]:
    """Parses `--adapter`. Raises ValueError."""
    try:
        return {} if text is None else parse_adapters(text.split(","))
    except AdapterInvalid as error:
        raise ValueError(f"--adapter: {error}") from error


def _adapters_dir(text: str | None) -> Path | None:
    """Parses `--adapters-dir`. Raises ValueError."""
    if text is None:
        return None
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise ValueError(f"--adapters-dir is {text!r}; allowed: a directory")
    return folder


def _policies(values: Mapping[str, Any]) -> PolicyConfig:
    """Returns the policies; a field with the name of an option has the value of that option."""
    named = {item.name: values[item.name] for item in fields(PolicyConfig) if item.name in values}
    converted = {
        "prefix_caching": not values["no_prefix_caching"],
        "host_prefix_cache": not values["no_host_prefix_cache"],
        "separates_tenants": not values["share_prefixes_across_tenants"],
        "speculation": Speculation(values["speculation"]),
        "preemption_mode": PreemptionMode(values["preemption_mode"]),
        "batch_policy": BatchPolicyName(values["batch_policy"]),
        "tenant_weights": _tenant_weights(values["tenant_weights"] or ""),
    }
    return PolicyConfig(**named | converted)


def _tenant_weights(text: str) -> dict[str, float]:
    """Parses weights such as `a=2,b=0.5`. Raises ValueError."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        tenant, separator, number = part.rpartition("=")
        if tenant.strip() in weights:
            raise ValueError(f"--tenant-weights has {tenant.strip()!r} twice; allowed: once")
        try:
            weights[tenant.strip()] = weight = float(number)
        except ValueError as error:
            raise _bad_weights(part) from error
        if not separator or not 0 < weight < math.inf:
            raise _bad_weights(part)
    return weights


def _bad_weights(part: str) -> ValueError:
    return ValueError(f"--tenant-weights has {part!r}; allowed: NAME=WEIGHT with a weight above 0")
