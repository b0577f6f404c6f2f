"""API key in the form that its owner has: `sk-ss-ID-SECRET`.

The secret is random, so reversing its plain SHA-256 is as hard as guessing the secret. A slow hash
would add nothing, and each call would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

PREFIX = "sk-ss-"
_ID_BYTES = 6
_SECRET_BYTES = 32
_ID = "[0-9a-f]{12}"
# The secret may contain the separator, the id may not.
_KEY = re.compile(rf"{PREFIX}(?P<key_id>{_ID})-(?P<secret>[A-Za-z0-9_-]{{43}})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """API key. `key_id` is public, `secret` is not."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def draw(cls) -> ApiKey:
        """Returns a new random key."""
        return cls(secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> ApiKey | None:
        """Returns the key in `text`; None if the form is wrong."""
        match = _KEY.fullmatch(text)
        return None if match is None else cls(match["key_id"], match["secret"])

    @property
    def text(self) -> str:
        """Key in its written form."""
        return f"{PREFIX}{self.key_id}-{self.secret}"

    @property
    def sha256(self) -> str:
        """SHA-256 of the secret in hexadecimal, as the key file stores it."""
        return hashlib.sha256(self.secret.encode("ascii")).hexdigest()

    def has(self, sha256: str) -> bool:
        """Returns whether the secret has this digest. Takes constant time."""
        return hmac.compare_digest(self.sha256, sha256)


def is_key_id(text: object) -> bool:
    """Returns whether `text` has the form of a key id."""
    return isinstance(text, str) and re.fullmatch(_ID, text) is not None
