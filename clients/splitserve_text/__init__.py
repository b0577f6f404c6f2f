"""Text of a language model: tokenizer, chat templates, text of tokens, and parsers of answers.

Knows nothing of RPC; the client and the gateway share it.
"""

from __future__ import annotations

from splitserve_text.answer_reader import (
    ContentDelta,
    Delta,
    NotAsExpected,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from splitserve_text.call_formats import (
    FORMATS,
    HERMES,
    JSON,
    MISTRAL,
    Draw,
    ToolCallFormat,
    tool_calls_of,
)
from splitserve_text.chat_template import ChatTemplates, Message, TemplateOptions
from splitserve_text.detokenizer import Detokenizer, make_detokenizer
from splitserve_text.errors import (
    ChatTemplateFailed,
    InvalidRequest,
    SplitserveError,
    TokenizerUnavailable,
)
from splitserve_text.output_parser import (
    OutputFormat,
    OutputParser,
    ParserOptions,
    ReasoningParserName,
    ToolCallParserName,
)
from splitserve_text.output_text import (
    End,
    OutputText,
    Piece,
    RequestTexts,
    StopStrings,
    TextRules,
    TokenNumbers,
)
from splitserve_text.reasoning import (
    MISTRAL_THINK,
    REASONING_MARKS,
    THINK,
    ReasoningMarks,
    ReasoningState,
)
from splitserve_text.speech import SpeechTask, SpeechTokens
from splitserve_text.tagged_calls import json_types
from splitserve_text.template_limits import TemplateLimits
from splitserve_text.template_sandbox import Sandbox
from splitserve_text.template_shapes import MessageShapes
from splitserve_text.token_texts import TokenTexts
from splitserve_text.tokenizer import AnyPrompt, Prompt, Tokenizer, as_prompt
from splitserve_text.tool_calls import ToolSchemas
from splitserve_text.unknown_calls import unread_calls
from splitserve_text.values import (
    NO_TRACE,
    BeamSearch,
    Choices,
    EarlyStopping,
    Finish,
    FinishReason,
    Grammar,
    JsonSchema,
    KeptOutput,
    Lark,
    PoolingParams,
    PoolingTask,
    Regex,
    ResumeTokenIds,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    TokenLogprob,
    Tokens,
    TopLogprob,
    TraceContext,
    TranscriptionRules,
    Usage,
)
from splitserve_text.vector_texts import EncodedPair, VectorTexts

__all__ = [
    "FORMATS",
    "HERMES",
    "JSON",
    "MISTRAL",
    "MISTRAL_THINK",
    "NO_TRACE",
    "REASONING_MARKS",
    "THINK",
    "AnyPrompt",
    "BeamSearch",
    "ChatTemplateFailed",
    "ChatTemplates",
    "Choices",
    "ContentDelta",
    "Delta",
    "Detokenizer",
    "Draw",
    "EarlyStopping",
    "EncodedPair",
    "End",
    "Finish",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "JsonSchema",
    "KeptOutput",
    "Lark",
    "Message",
    "MessageShapes",
    "NotAsExpected",
    "OutputFormat",
    "OutputParser",
    "OutputText",
    "ParserOptions",
    "Piece",
    "PoolingParams",
    "PoolingTask",
    "Prompt",
    "ReasoningDelta",
    "ReasoningMarks",
    "ReasoningParserName",
    "ReasoningState",
    "Regex",
    "RequestTexts",
    "ResumeTokenIds",
    "SamplingParams",
    "Sandbox",
    "SchedulingParams",
    "SequenceFinish",
    "SpeechTask",
    "SpeechTokens",
    "SplitserveError",
    "StopStrings",
    "TemplateLimits",
    "TemplateOptions",
    "TextRules",
    "TokenLogprob",
    "TokenNumbers",
    "TokenTexts",
    "Tokenizer",
    "TokenizerUnavailable",
    "Tokens",
    "ToolCallArguments",
    "ToolCallFormat",
    "ToolCallParserName",
    "ToolCallStart",
    "ToolSchemas",
    "TopLogprob",
    "TraceContext",
    "TranscriptionRules",
    "Usage",
    "VectorTexts",
    "as_prompt",
    "json_types",
    "make_detokenizer",
    "tool_calls_of",
    "unread_calls",
]
