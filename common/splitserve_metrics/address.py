"""Address at which the metrics of a process are read, checked before the process starts work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve_rpc.addresses import is_loopback
from splitserve_rpc.security import check_exposure
from splitserve_rpc.tls import TlsFiles
from splitserve_rpc.web_guard import split_hosts

_PROBLEM = "without --tls-cert, --tls-key and --tls-ca whoever reaches it reads them"


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Address of the metrics listener. `listen`: `host:port`.

    `tls`: TLS towards readers, who then need a certificate; None for plain text. `allowed_hosts`:
    further host names that readers may use with plain text.
    """

    listen: str
    tls: TlsFiles | None = None
    allowed_hosts: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> MetricsAddress | None:
        """Reads the address from the options of a process; None if metrics are off.

        Listens in plain text on addresses of this machine, since its users may know everything in
        there. Raises SecurityUnusable.
        """
        listen = values["metrics_listen"]
        if listen is None:
            return None
        paths = [values[name] for name in ("tls_cert", "tls_key", "tls_ca")]
        is_protected = all(paths)
        check_exposure(
            "metrics-listen",
            listen,
            is_protected=is_protected,
            insecure=values["insecure"],
            problem=_PROBLEM,
        )
        if is_loopback(listen) or not is_protected:
            return cls(listen, allowed_hosts=split_hosts(values.get("allowed_hosts")))
        return cls(listen, TlsFiles(*map(Path, paths)))
