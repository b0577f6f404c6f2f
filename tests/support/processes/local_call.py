"""What a servicer asks of its call, where it is called without gRPC."""

from __future__ import annotations

from tests.support.security.bearer import bearer


class LocalCall:
    """Stands for a grpc.aio.ServicerContext, which cannot be made. `credential`: empty for none."""

    def __init__(self, credential: str = "") -> None:
        self._credential = credential

    def peer(self) -> str:
        """Who calls."""
        return "test"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What the call brings."""
        return bearer(self._credential)
