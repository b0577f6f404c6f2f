"""What is said of an address that others could reach, and should not."""

from __future__ import annotations


def exposed(option: str, address: object, problem: str) -> str:
    """What is said to whoever would let others reach `address`."""
    return (
        f"--{option} {address}: others can reach it, and {problem} (docs/security.md); --insecure "
        "listens there even so"
    )


def missing_for_http(*, is_encrypted: bool, knows_clients: bool) -> str:
    """Which options others may not reach HTTP without; empty if all are given."""
    missing = []
    if not is_encrypted:
        missing.append("without --http-tls-cert and --http-tls-key it is not encrypted")
    if not knows_clients:
        missing.append("without --gateway-key-file or --http-tls-client-ca it knows no caller")
    return ", and ".join(missing)
