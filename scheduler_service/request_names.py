"""What a request is called: by its client, and inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

# Names a request in the cluster and its cores. Only `RequestName` makes one.
RequestKey = NewType("RequestKey", str)


@dataclass(frozen=True, slots=True)
class RequestName:
    """A client's own id of a request, and the tenant whose ids it is one of.

    `tenant`: None where nobody is told apart, and ids are everybody's. Whoever has an id comes to
    a request through this, so none of another tenant can be reached, whatever the id says.
    """

    own_id: str
    tenant: str | None = None

    @classmethod
    def of_key(cls, key: str, tenant: str) -> RequestName:
        """The name that has this key, if the request is for `tenant`."""
        prefix = f"{len(tenant)}:{tenant}:"
        if tenant and key.startswith(prefix):
            return cls(key.removeprefix(prefix), tenant)
        return cls(key)

    @property
    def key(self) -> RequestKey:
        """Another for each pair of tenant and id."""
        if self.tenant is None:
            return RequestKey(self.own_id)
        return RequestKey(f"{len(self.tenant)}:{self.tenant}:{self.own_id}")
