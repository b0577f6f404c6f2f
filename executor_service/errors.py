"""Errors of the executor service.

ExecutorError
├── ModelUnsupported     the checkpoint cannot be served; said at load, by name
├── ModelUnreadable      the checkpoint is missing or broken
├── BackendUnavailable   what was chosen to compute with does not work here
├── RecordingFailed      a CUDA graph could not be recorded, and the device is in disorder since
├── OutOfMemory          pools or weights do not fit; said with numbers
└── StepFailed           one step failed as a whole; the process lives
TrialFailed              code computes something else than plain torch, and does not serve
"""

from __future__ import annotations


class ExecutorError(Exception):
    """Base of all errors this service raises on purpose; its text is meant for people."""


class ModelUnsupported(ExecutorError):
    """The architecture, or an option of it, cannot be served."""


class ModelUnreadable(ExecutorError):
    """The checkpoint is missing, incomplete or broken."""


class BackendUnavailable(ExecutorError):
    """The attention backend that was asked for cannot be had."""


class RecordingFailed(ExecutorError):
    """A recording broke off in its middle; without recordings the process could serve."""


class OutOfMemory(ExecutorError):
    """Something does not fit; the message has the numbers."""


class TrialFailed(Exception):
    """What was tried computes something else than plain torch; it does not serve."""


class StepFailed(ExecutorError):
    """A step failed as a whole and no row has a token."""


_MAX_ERROR_CHARS = 300


def one_line(error: BaseException) -> str:
    """What an error says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
