"""Security settings of a process, read once from its options and checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve_common import FilesUnusable, exposed, is_loopback, warn_if_readable
from splitserve_rpc.access import ClusterIdentity, Role
from splitserve_rpc.tls import Tls, TlsFiles

_MIN_TOKEN_CHARS = 16
_MAX_TOKEN_CHARS = 1024

_log = logging.getLogger(__name__)


class SecurityUnusable(Exception):
    """Error: options that are invalid, or that would expose the process. One line for people."""


@dataclass(frozen=True, slots=True)
class Security:
    """Security of one process.

    `identity`: identity in the cluster. `client_tls`: TLS towards clients, None for plain text.
    """

    identity: ClusterIdentity
    client_tls: Tls | None

    @classmethod
    def from_options(cls, values: Mapping[str, Any], role: Role | None = None) -> Security:
        """Reads the security from the options of a process. Raises SecurityUnusable.

        Missing options count as unset. `role`: of the process; its certificate must name the role
        if roles are checked.
        """
        cert, key, ca = (values.get(name) for name in ("tls_cert", "tls_key", "tls_ca"))
        client_ca = values.get("tls_client_ca")
        check_pair(cert, key)
        if cert is None and (ca or client_ca):
            option = "tls-ca" if ca else "tls-client-ca"
            raise SecurityUnusable(f"--{option} is given without --tls-cert and --tls-key")
        token = read_token(values.get("cluster_token_file"))
        if cert is None:
            return cls(ClusterIdentity(token=token), None)
        try:
            name = None if role is None or ca is None else role.dns_name
            identity = ClusterIdentity(Tls(_files(cert, key, ca), name), token)
            return cls(identity, Tls(_files(cert, key, client_ca)))
        except FilesUnusable as error:
            paths = {"tls-cert": cert, "tls-key": key, "tls-ca": ca, "tls-client-ca": client_ca}
            problem = str(error)
            named = (f"--{name} " for name, path in paths.items() if problem.startswith(f"{path}:"))
            raise SecurityUnusable(f"{next(named, '')}{problem}") from error

    @property
    def shown(self) -> tuple[TlsFiles, ...]:
        """Files of the certificates that this process shows to others."""
        return tuple(tls.files for tls in (self.identity.tls, self.client_tls) if tls is not None)

    @property
    def protects_cluster(self) -> bool:
        """Whether connections in the cluster are encrypted and their callers checked."""
        return self.identity.tls is not None and self.identity.is_proof

    @property
    def protects_clients(self) -> bool:
        """Whether connections of clients are encrypted and the clients checked."""
        return self.client_tls is not None and self.client_tls.checks_clients


def check_pair(cert: object, key: object, prefix: str = "tls") -> None:
    """Raises SecurityUnusable for a certificate without a key, or a key without a certificate.

    `prefix`: common prefix of both options.
    """
    if (cert is None) != (key is None):
        present, missing = ("cert", "key") if cert else ("key", "cert")
        raise SecurityUnusable(f"--{prefix}-{present} is given without --{prefix}-{missing}")


def check_exposure(
    option: str,
    address: str,
    *,
    is_protected: bool,
    insecure: bool,
    problem: str = "not all connections are encrypted and authenticated",
) -> None:
    """Raises SecurityUnusable if other machines could reach `address` without protection.

    `insecure`: allows it and logs a warning. `problem`: reason why the address is not protected.
    """
    if is_protected or is_loopback(address):
        return
    if not insecure:
        raise SecurityUnusable(exposed(option, address, problem))
    _log.warning("listening_insecurely option=%s address=%s", option, address)


def _files(*paths: str | None) -> TlsFiles:
    """Returns the TLS files from the paths of certificate, key and authority."""
    return TlsFiles(*(Path(path) if path else None for path in paths))


def read_token(path: str | Path | None) -> str | None:
    """Returns the token in `--cluster-token-file`; None without a path. Raises SecurityUnusable."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise SecurityUnusable(f"--cluster-token-file {path}: {problem}") from error
    warn_if_readable(Path(path))
    if not (_MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS and token.isprintable()):
        raise SecurityUnusable(
            f"--cluster-token-file {path}: has {len(token)} characters; allowed: "
            f"{_MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS}, all printable"
        )
    return token
