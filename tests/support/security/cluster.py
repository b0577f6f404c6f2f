"""Certificates of a cluster, as `splitserve certs` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from splitserve_cli.certs import main as make_certificates
from splitserve_rpc.access import ClusterIdentity
from splitserve_rpc.tls import Tls, TlsFiles


@dataclass(frozen=True, slots=True)
class Certificates:
    """A directory of them."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, *options: str) -> Certificates:
        """Makes or renews them."""
        assert make_certificates([str(directory), *options]) == 0
        return cls(directory)

    def files(self, name: str, *, ca: bool = True) -> TlsFiles:
        """Of `name`; `ca`: who believes the authority, too."""
        directory = self.directory
        authority = directory / "ca.crt" if ca else None
        return TlsFiles(directory / f"{name}.crt", directory / f"{name}.key", authority)

    def identity(self, name: str) -> ClusterIdentity:
        """Of a process of the cluster."""
        return ClusterIdentity(Tls(self.files(name)))

    def flags(self, name: str) -> list[str]:
        """The options of a process that is `name`."""
        files = self.files(name)
        return [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]

    def client(self, name: str | None = None) -> grpc.ChannelCredentials:
        """Of a client with the certificate of `name`, or with none."""
        ca = (self.directory / "ca.crt").read_bytes()
        if name is None:
            return grpc.ssl_channel_credentials(ca)
        key = (self.directory / f"{name}.key").read_bytes()
        return grpc.ssl_channel_credentials(ca, key, (self.directory / f"{name}.crt").read_bytes())
