"""Python client of splitserve: `AsyncClient`, and `Client` for programs without asyncio.

The API carries token ids, not text. The client fetches the model's tokenizer once, encodes prompts
and decodes outputs itself.
"""

from __future__ import annotations

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.client import AsyncClient
from splitserve_client.client_config import ClientConfig
from splitserve_client.detokenizer import Detokenizer
from splitserve_client.errors import (
    CallerNotAllowed,
    CallerUnknown,
    ChatTemplateFailed,
    CredentialsUnusable,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    InvalidRequest,
    ModelChanged,
    ModelNotReady,
    QueueFull,
    QuotaExceeded,
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
from splitserve_client.output_text import TextRules
from splitserve_client.prompt import Prompt
from splitserve_client.resumption import RetryPolicy, Timing
from splitserve_client.session import Session
from splitserve_client.session_request import SessionRequest
from splitserve_client.stop_strings import StopStrings
from splitserve_client.sync_client import Client
from splitserve_client.text_calls import stream_text
from splitserve_client.text_generation import TextCompletion, TextGeneration, collect_text
from splitserve_client.text_map import MapResult
from splitserve_client.text_stream import End, Piece, RequestTexts
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import (
    BeamSearch,
    Choices,
    DrainedExecutor,
    EarlyStopping,
    Executor,
    ExecutorList,
    Finish,
    FinishReason,
    Grammar,
    Identity,
    JsonSchema,
    Lark,
    Model,
    Readiness,
    Regex,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    TopLogprob,
    TraceContext,
    Usage,
)
from splitserve_client.unread import UnreadBudget
from splitserve_rpc.tls import TlsFiles

__all__ = [
    "AsyncClient",
    "BeamSearch",
    "CallerNotAllowed",
    "CallerUnknown",
    "ChatTemplateFailed",
    "Choices",
    "Client",
    "ClientConfig",
    "Completion",
    "CredentialsUnusable",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "Detokenizer",
    "DrainedExecutor",
    "Draining",
    "EarlyStopping",
    "End",
    "Executor",
    "ExecutorList",
    "Finish",
    "FinishReason",
    "Generation",
    "Grammar",
    "Identity",
    "InvalidRequest",
    "JsonSchema",
    "Lark",
    "MapResult",
    "Message",
    "Model",
    "ModelChanged",
    "ModelNotReady",
    "Piece",
    "Prompt",
    "QueueFull",
    "QuotaExceeded",
    "Readiness",
    "Regex",
    "RequestFailed",
    "RequestIdInUse",
    "RequestTexts",
    "RequestUnknown",
    "ResumeTokenIds",
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
    "TemplateOptions",
    "TextCompletion",
    "TextGeneration",
    "TextRules",
    "Timing",
    "TlsFiles",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerUnavailable",
    "Tokens",
    "TopLogprob",
    "TraceContext",
    "UnreadBudget",
    "Usage",
    "collect_generation",
    "collect_text",
    "stream_text",
]
