"""Messages about addresses that other machines can reach without protection."""

from __future__ import annotations


def exposed(option: str, address: object, problem: str) -> str:
    """Returns the error message for a listener at `address` that other machines could reach."""
    return (
        f"--{option} {address}: others can reach it, and {problem} (docs/security.md); --insecure "
        "listens there even so"
    )


def missing_for_http(*, is_encrypted: bool, knows_clients: bool) -> str:
    """Returns as text the options without which others may not reach HTTP; empty if none lacks."""
    missing = []
    if not is_encrypted:
        missing.append("without --http-tls-cert and --http-tls-key it is not encrypted")
    if not knows_clients:
        missing.append("without --gateway-key-file or --http-tls-client-ca it knows no caller")
    return ", and ".join(missing)
