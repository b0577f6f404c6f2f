"""A client of splitserve: `AsyncClient`, `Client` without asyncio, and the command line.

Token ids cross the API, text does not; `client.get_tokenizer()` brings what turns one into the
other. Names are imported when they are first used, so that the command line starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve_client.client import AsyncClient
    from splitserve_client.completion import End, Piece, Prompt, stream_text
    from splitserve_client.connection import ClientConfig
    from splitserve_client.detokenizer import Detokenizer, StopStrings
    from splitserve_client.errors import (
        ChatTemplateFailed,
        DeadlineExceeded,
        DeadlineUnreachable,
        Draining,
        InvalidRequest,
        ModelNotReady,
        QueueFull,
        RequestFailed,
        RequestIdInUse,
        RequestUnknown,
        ServerFault,
        ServerUnreachable,
        SplitserveError,
        StreamNotRead,
        TokenizerUnavailable,
    )
    from splitserve_client.generation import Completion, Generation, collect_generation
    from splitserve_client.resumption import RetryPolicy, Timing
    from splitserve_client.session import Session, SessionRequest
    from splitserve_client.sync_client import Client
    from splitserve_client.tokenizer import Tokenizer
    from splitserve_client.types import (
        BeamSearch,
        EarlyStopping,
        Executor,
        ExecutorList,
        Finish,
        FinishReason,
        Model,
        SamplingParams,
        SchedulingParams,
        SequenceFinish,
        TokenLogprob,
        Tokens,
        TopLogprob,
        Usage,
    )

_NAMES_OF_MODULE = {
    "client": ("AsyncClient",),
    "completion": ("End", "Piece", "Prompt", "stream_text"),
    "connection": ("ClientConfig",),
    "detokenizer": ("Detokenizer", "StopStrings"),
    "errors": (
        "ChatTemplateFailed", "DeadlineExceeded", "DeadlineUnreachable", "Draining",
        "InvalidRequest", "ModelNotReady", "QueueFull", "RequestFailed", "RequestIdInUse",
        "RequestUnknown", "ServerFault", "ServerUnreachable", "SplitserveError",
        "StreamNotRead", "TokenizerUnavailable",
    ),
    "generation": ("Completion", "Generation", "collect_generation"),
    "resumption": ("RetryPolicy", "Timing"),
    "session": ("Session", "SessionRequest"),
    "sync_client": ("Client",),
    "tokenizer": ("Tokenizer",),
    "types": (
        "BeamSearch", "EarlyStopping", "Executor", "ExecutorList", "Finish", "FinishReason",
        "Model", "SamplingParams", "SchedulingParams", "SequenceFinish", "TokenLogprob", "Tokens",
        "TopLogprob", "Usage",
    ),
}  # fmt: skip
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = [
    "AsyncClient",
    "BeamSearch",
    "ChatTemplateFailed",
    "Client",
    "ClientConfig",
    "Completion",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "Detokenizer",
    "Draining",
    "EarlyStopping",
    "End",
    "Executor",
    "ExecutorList",
    "Finish",
    "FinishReason",
    "Generation",
    "InvalidRequest",
    "Model",
    "ModelNotReady",
    "Piece",
    "Prompt",
    "QueueFull",
    "RequestFailed",
    "RequestIdInUse",
    "RequestUnknown",
    "RetryPolicy",
    "SamplingParams",
    "SchedulingParams",
    "SequenceFinish",
    "ServerFault",
    "ServerUnreachable",
    "Session",
    "SessionRequest",
    "SplitserveError",
    "StopStrings",
    "StreamNotRead",
    "Timing",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerUnavailable",
    "Tokens",
    "TopLogprob",
    "Usage",
    "collect_generation",
    "stream_text",
]


def __getattr__(name: str) -> object:
    """Imports the module that has `name`."""
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
