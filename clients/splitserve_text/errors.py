"""Errors of text, and the base class of all errors of the client.

`splitserve_client.errors` has the whole tree.
"""

from __future__ import annotations


class SplitserveError(Exception):
    """Base class of all errors of the client. `reason`: the server's reason code, or empty."""

    def __init__(self, message: str, reason: str = "", retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_delay_s = retry_delay_s


class InvalidRequest(SplitserveError):
    """Reports that the request is not valid."""


class TokenizerUnavailable(SplitserveError):
    """Reports that the server offers no tokenizer, or no readable one."""


class ChatTemplateFailed(SplitserveError):
    """Reports that the model's chat template does not accept the messages."""
