"""What the options say about callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from splitserve_rpc.addresses import is_loopback

SAFE_URLS = "https://..., or http:// to this machine alone"


@dataclass(frozen=True, slots=True)
class TokensConfig:
    """Tokens (JWT) of one issuer. `keys`: a JWK set, its URL, or None: as the issuer says."""

    issuer: str
    audience: str
    tenant_claim: str
    keys: Path | str | None = None


@dataclass(frozen=True, slots=True)
class CallersConfig:
    """How callers are known, and what their tenants may have; nothing: nobody is asked."""

    api_keys: Path | None = None
    tenants: Path | None = None
    tokens: TokensConfig | None = None

    @property
    def knows_callers(self) -> bool:
        """Whether callers need a credential."""
        return self.api_keys is not None or self.tokens is not None

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> CallersConfig:
        """Raises ValueError for what cannot be meant."""
        config = cls(_path(values["api_keys"]), _path(values["tenants"]), _tokens(values))
        if config.tenants is not None and not config.knows_callers:
            raise ValueError(
                "--tenants is given without --api-keys and --jwt-issuer: as long as tenants are "
                "what callers say they are, limits hold nobody"
            )
        if config.tenants is not None and values["tenant_weights"] is not None:
            raise ValueError("--tenant-weights and --tenants exclude each other; the file has them")
        return config


def is_safe_url(url: str) -> bool:
    """Whether what comes from there comes from whom it names."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    # A password in it would be logged with it.
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
        # Else a token for any other service of the issuer would be good here.
        raise ValueError("--jwt-issuer is given without --jwt-audience")
    if keys is None and not is_safe_url(issuer):
        raise ValueError(
            f"--jwt-issuer is {issuer!r}; allowed: {SAFE_URLS}, or with --jwt-keys any"
        )
    if keys is not None and "://" in keys and not is_safe_url(keys):
        raise ValueError(f"--jwt-keys is {keys!r}; allowed: a file, {SAFE_URLS}")
    is_file = keys is not None and "://" not in keys
    return TokensConfig(
        issuer, audience, values["jwt_tenant_claim"], Path(keys) if is_file else keys
    )
