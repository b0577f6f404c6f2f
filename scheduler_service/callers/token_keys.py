"""The public keys of an issuer of tokens: a JWK set. Needs joserfc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey

from splitserve_rpc.json_text import parse_json
from splitserve_rpc.watched_files import FilesUnusable, read_bytes

MAX_SET_BYTES = 2**20
_MAX_KEYS = 100
# Whoever knows a key of the kind `oct` can sign, too.
_KINDS = ("RSA", "EC", "OKP")
# Base64 of the modulus of the shortest RSA key that counts as safe, 2048 bits.
_MIN_MODULUS_CHARS = 342

TokenKey = RSAKey | ECKey | OKPKey


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """Those of an issuer that verify."""

    keys: tuple[TokenKey, ...]

    def find(self, kid: object) -> TokenKey | None:
        """The key that a token names by `kid`; a token without one means the only key there is."""
        if kid is None:
            return self.keys[0] if len(self.keys) == 1 else None
        return next((key for key in self.keys if key.kid == kid), None)


NO_TOKEN_KEYS = TokenKeys(())


def read_token_keys(path: Path) -> TokenKeys:
    """Raises FilesUnusable."""
    try:
        return parse_token_keys(read_bytes(path, MAX_SET_BYTES))
    except ValueError as error:
        raise FilesUnusable(f"{path}: {error}") from error


def parse_token_keys(content: bytes) -> TokenKeys:
    """The keys of a set that verify; RFC 7517 has others left out. Raises ValueError."""
    if len(content) > MAX_SET_BYTES:
        raise ValueError(f"is too large; allowed: {MAX_SET_BYTES} bytes")
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"is no JWK set; allowed: an object whose `keys` are at most {_MAX_KEYS}")
    keys = tuple(key for key in map(_key, entries) if key is not None)
    if not keys:
        raise ValueError(f"has no key that verifies signatures; allowed: {', '.join(_KINDS)}")
    return TokenKeys(keys)


def _key(entry: object) -> TokenKey | None:
    if not isinstance(entry, dict) or entry.get("kty") not in _KINDS:
        return None
    if entry.get("use", "sig") != "sig" or not _may_verify(entry.get("key_ops")):
        return None
    if entry["kty"] == "RSA" and len(str(entry.get("n"))) < _MIN_MODULUS_CHARS:
        return None
    try:
        key = JWKRegistry.import_key(entry)
    except Exception:
        # Of another curve, or broken: the library says so in many ways, and others are of use.
        return None
    return key if isinstance(key, TokenKey) else None


def _may_verify(operations: object) -> bool:
    return operations is None or (isinstance(operations, list) and "verify" in operations)
