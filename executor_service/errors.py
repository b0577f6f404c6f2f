"""Errors of the executor service.

ExecutorError
├── ModelUnsupported     the checkpoint cannot be served; raised at load, with the reason by name
├── ModelUnreadable      the checkpoint is missing or broken
├── BackendUnavailable   the chosen compute backend does not work here
├── RecordingFailed      recording a CUDA graph failed and left the device unusable
├── OutOfMemory          pools or weights do not fit; the message has the numbers
└── StepFailed           one step failed as a whole; the process lives
TrialFailed              code computes something else than plain torch, and is not used
"""

from __future__ import annotations


class ExecutorError(Exception):
    """Base of all errors this service raises on purpose; its text is meant for people."""


class ModelUnsupported(ExecutorError):
    """The architecture, or one of its options, cannot be served."""


class ModelUnreadable(ExecutorError):
    """The checkpoint is missing, incomplete or broken."""


class BackendUnavailable(ExecutorError):
    """The attention backend that was asked for does not work here."""


class RecordingFailed(ExecutorError):
    """Recording a CUDA graph broke off midway. The process could serve without recordings."""


class OutOfMemory(ExecutorError):
    """Weights, pools or a step do not fit; the message has the numbers."""


class TrialFailed(Exception):
    """A replacement computes something else than plain torch, and is not used."""


class StepFailed(ExecutorError):
    """A step failed as a whole; no row has a token."""


_MAX_ERROR_CHARS = 300


def one_line(error: BaseException) -> str:
    """Returns the text of an error on one line, cut after 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
