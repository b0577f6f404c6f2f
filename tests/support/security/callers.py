"""A server that knows callers by one credential."""

from __future__ import annotations

from splitserve_rpc.access import NOBODY, Access, ClusterIdentity, Metadata
from splitserve_rpc.domain_error import DomainError


class OneKey(Access):
    """Lets in who brings `key`, None: anybody; `calls` has who brought what."""

    def __init__(self, key: str | None = None, identity: ClusterIdentity = NOBODY) -> None:
        super().__init__(identity)
        self.key = key
        self.calls: list[tuple[str, str]] = []

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        brought = str(dict(metadata).get("authorization", ""))
        self.calls.append((method.rpartition("/")[2], brought))
        if self.key is not None and brought != f"Bearer {self.key}":
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid")
        super().check_metadata(method, metadata)
