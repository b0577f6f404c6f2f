"""Domain error of all splitserve packages, independent of gRPC."""

from __future__ import annotations

DOMAIN = "splitserve"


class DomainError(Exception):
    """Refusal with a reason for programs and a message for people.

    `reason`: a key of `splitserve_rpc.errors.CODE_OF_REASON`. `retry_delay_s`: None if a retry is
    not useful. `limit`: name of the tenant's limit that refused, or empty. `schedulers`: addresses
    of other schedulers that may accept the request.
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
