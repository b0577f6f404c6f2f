"""An API key as its owner has it: `sk-ss-ID-SECRET`.

The secret is drawn, not thought of, so its plain SHA-256 is as hard to reverse as it is to guess:
nothing is gained by a hash that is slow on purpose, and each call would pay for it.
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
# The secret may have the separator in it, the id may not.
_KEY = re.compile(rf"{PREFIX}(?P<key_id>{_ID})-(?P<secret>[A-Za-z0-9_-]{{43}})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key. `key_id` may be said to anybody, `secret` to nobody."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def draw(cls) -> ApiKey:
        """A new one, which nobody can guess."""
        return cls(secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> ApiKey | None:
        """The key in `text`, None if it has not the form of one."""
        match = _KEY.fullmatch(text)
        return None if match is None else cls(match["key_id"], match["secret"])

    @property
    def text(self) -> str:
        """As its owner writes it."""
        return f"{PREFIX}{self.key_id}-{self.secret}"

    @property
    def sha256(self) -> str:
        """What a file may know of the secret."""
        return hashlib.sha256(self.secret.encode("ascii")).hexdigest()

    def has(self, sha256: str) -> bool:
        """Whether that is the digest of its secret; takes as long wherever they differ."""
        return hmac.compare_digest(self.sha256, sha256)


def is_key_id(text: object) -> bool:
    """Whether `text` could be the id of a key."""
    return isinstance(text, str) and re.fullmatch(_ID, text) is not None
