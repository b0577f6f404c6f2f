"""What a servicer asks of its call, where it is called without gRPC."""

from __future__ import annotations


class LocalCall:
    """Stands for a grpc.aio.ServicerContext, which cannot be made. `credential`: empty for none."""

    def __init__(self, credential: str = "") -> None:
        self._credential = credential

    def peer(self) -> str:
        """Who calls."""
        return "test"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What the call brings."""
        return (("authorization", f"Bearer {self._credential}"),) if self._credential else ()
