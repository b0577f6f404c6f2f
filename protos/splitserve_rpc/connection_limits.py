"""What peers of a gRPC server may hold open, whoever they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one server. gRPC cannot count by address; where that is needed, a proxy in front can.

    `max_connections`: further ones are closed at once. `max_streams`: calls side by side on one
    connection; clients that keep to HTTP/2 hold the next one back. `handshake_s`: from the
    connection to the end of TLS and HTTP/2's first words. `idle_s`: without any call; clients of
    gRPC connect again with the next one. `metadata_bytes`: headers of a call as HTTP/2 counts
    them; a credential may have 8 KiB.
    """

    max_connections: int = 4096
    max_streams: int = 4096
    handshake_s: float = 20.0
    idle_s: float = 300.0
    metadata_bytes: int = 16 * 1024

    def options(self) -> list[tuple[str, int]]:
        """As gRPC has them."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1000)),
            # Between the two it would refuse now and then.
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
        ]


LIMITS = ConnectionLimits()
