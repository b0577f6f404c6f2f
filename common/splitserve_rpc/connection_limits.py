"""Limits for the connections and calls that peers of a gRPC server may hold open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one server. gRPC cannot count by address; a proxy in front can.

    `max_connections`: further connections are closed at once. `max_streams`: concurrent calls of
    one connection; HTTP/2 clients hold the next call back. `handshake_s`: from the connection to
    the end of the TLS handshake and of the HTTP/2 preface. `idle_s`: time without any call before
    the connection is closed; gRPC clients connect again with the next call. `metadata_bytes`:
    headers of a call as HTTP/2 counts them; a credential may have 8 KiB.
    """

    max_connections: int = 4096
    max_streams: int = 4096
    handshake_s: float = 20.0
    idle_s: float = 300.0
    metadata_bytes: int = 16 * 1024

    def options(self) -> list[tuple[str, int]]:
        """Returns the limits as gRPC server options."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1000)),
            # Both are equal, since gRPC refuses sizes between the two at random.
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
        ]


LIMITS = ConnectionLimits()
