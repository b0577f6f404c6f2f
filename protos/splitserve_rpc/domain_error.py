"""The error that every domain of splitserve raises; knows nothing of gRPC."""

from __future__ import annotations

DOMAIN = "splitserve"


class DomainError(Exception):
    """A refusal with a reason that programs can act on and a message that people can.

    `reason` is one of the keys of `splitserve_rpc.errors.CODE_OF_REASON`. `limit`: the name of the
    tenant's limit that refused, if one did. `schedulers`: addresses of others that may do it.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        retry_delay_s: float | None = None,
        limit: str = "",
        schedulers: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_delay_s = retry_delay_s
        self.limit = limit
        self.schedulers = schedulers
