"""Python client of splitserve: `AsyncClient`, and `Client` for programs without asyncio.

The API carries token ids, not text. The client fetches the model's tokenizer once, encodes prompts
and decodes outputs itself.
"""

from __future__ import annotations

from splitserve_client.client import AsyncClient
from splitserve_client.client_config import ClientConfig, RetryPolicy, Timing
from splitserve_client.errors import (
    CallerNotAllowed,
    CallerUnknown,
    CredentialsUnusable,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    ModelChanged,
    ModelNotReady,
    QueueFull,
    QuotaExceeded,
    RequestFailed,
    RequestIdInUse,
    RequestUnknown,
    ServerFault,
    ServerUnreachable,
    StreamNotRead,
)
from splitserve_client.generation import (
    Completion,
    Generation,
    TextCompletion,
    TextGeneration,
    collect_generation,
    collect_text,
)
from splitserve_client.scheduler_info import (
    DrainedExecutor,
    Executor,
    ExecutorList,
    Identity,
    Model,
    Readiness,
)
from splitserve_client.session import Session
from splitserve_client.session_request import SessionRequest, UnreadBudget
from splitserve_client.sync_client import Client
from splitserve_client.text_calls import stream_text
from splitserve_client.text_map import MapResult
from splitserve_rpc.tls import TlsFiles
from splitserve_text.chat_template import Message, TemplateOptions
from splitserve_text.detokenizer import Detokenizer
from splitserve_text.errors import (
    ChatTemplateFailed,
    InvalidRequest,
    SplitserveError,
    TokenizerUnavailable,
)
from splitserve_text.output_text import End, Piece, RequestTexts, StopStrings, TextRules
from splitserve_text.tokenizer import Prompt, Tokenizer
from splitserve_text.values import (
    BeamSearch,
    Choices,
    EarlyStopping,
    Finish,
    FinishReason,
    Grammar,
    JsonSchema,
    Lark,
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
