"""Notations of tool calls, by families of models, and their detection by a chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from splitserve_text.answer_reader import NotAsExpected, Reading
from splitserve_text.literals import FUNCTION_GEMMA, GEMMA
from splitserve_text.tagged_calls import KeyValueBody, TaggedBody, Tags
from splitserve_text.tool_calls import (
    DEEPSEEK_SEPARATOR,
    CallBody,
    CallReader,
    DeepSeekBody,
    JsonBody,
    KeyedBody,
    KimiBody,
    MistralBody,
    PythonBody,
    TypedBody,
)

# Chooses one of some characters.
Draw = Callable[[str], str]
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Notation of tool calls in a family of models.

    `openers`: texts that announce calls. `body`: the notation of one call. `before`, `after`: texts
    around each call; `closers`: texts after all calls of an opener. Closing texts may be missing
    where the answer ends or an opener follows. `separators`: characters between calls outside of
    lists; None if an opener announces a single call or list. `may_be_bare`: calls may also stand at
    the very beginning of an answer without an opener. `is_certain`: openers are no usual text, so
    that calls of unknown tools count. `ends_reasoning`: an opener ends reasoning whose end is
    missing; otherwise calls within reasoning are reasoning. `markers`: further texts that may be
    special tokens.
    """

    name: str
    openers: tuple[str, ...]
    body: CallBody
    closers: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    separators: str | None = None
    may_be_bare: bool = False
    is_certain: bool = True
    ends_reasoning: bool = False
    markers: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_length: int = 24

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Texts of this notation that models may have as special tokens."""
        return (*self.openers, *self.before, *self.after, *self.closers, *self.markers)

    def new_id(self, draw: Draw = secrets.choice) -> str:
        """Returns a new unique call id, of characters that `draw` chooses."""
        return self.id_prefix + "".join(draw(_ID_CHARS) for _ in range(self.id_length))

    def read(self, calls: CallReader, opener: str) -> Reading[None]:
        """Reads and writes calls after `opener`; "" without one. Raises NotAsExpected."""
        reader = calls.reader
        calls.begin(opener, opener, is_marked=bool(opener) and self.is_certain)
        yield from reader.skip_space()
        if opener.endswith("["):
            yield from self._read_list(calls)
        elif self.body.lists and (yield from reader.peek()) == "[":
            reader.skip(1)
            yield from self._read_list(calls)
        else:
            yield from self._read_sequence(calls, is_bare=not opener)
        if self.closers and opener:
            yield from self._read_end(calls, self.closers)

    def _read_list(self, calls: CallReader) -> Reading[None]:
        reader = calls.reader
        while True:
            yield from reader.skip_space()
            calls.is_closing = False
            yield from self.body.read(calls)
            yield from reader.skip_space()
            char = yield from reader.peek()
            if char == "":
                return
            reader.skip(char in (",", "]"))
            if char == "]":
                return
            if char != ",":
                raise NotAsExpected

    def _read_sequence(self, calls: CallReader, *, is_bare: bool) -> Reading[None]:
        reader = calls.reader
        if self.before and calls.opener not in self.before:
            yield from self._expect(calls, self.before)
        while True:
            calls.is_closing = False
            if is_bare and (yield from reader.peek()) != "{":
                raise NotAsExpected
            yield from self.body.read(calls)
            if self.after:
                yield from self._read_end(calls, self.after)
            if self.separators is None:
                return
            yield from reader.skip_space()
            if (yield from self._ends_here(calls)):
                return
            if (yield from reader.peek()) in self.separators:
                reader.skip(1)
                yield from reader.skip_space()
            if self.before:
                yield from self._expect(calls, self.before)

    def _expect(self, calls: CallReader, texts: tuple[str, ...]) -> Reading[None]:
        if (yield from calls.reader.one_of(texts)) is None:
            raise NotAsExpected
        yield from calls.reader.skip_space()

    def _read_end(self, calls: CallReader, texts: tuple[str, ...]) -> Reading[None]:
        """Reads one of `texts`; some models forget it before they open again, or end."""
        yield from calls.reader.skip_space()
        if (yield from calls.reader.one_of(texts)) is not None:
            calls.end()
        elif not (yield from self._ends_here(calls)):
            raise NotAsExpected

    def _ends_here(self, calls: CallReader) -> Reading[bool]:
        """Returns whether a closer, an opener or the end of the answer comes next."""
        length = 0
        texts = (*self.closers, *self.openers)
        while True:
            length += 1
            found = yield from calls.reader.peek(length)
            if len(found) < length or found in texts:
                return not found or found in texts
            if not any(text.startswith(found) for text in texts):
                return False


# -- Families --------------------------------------------------------------------------------------

_FUNCTION_TAGS = Tags("<function=", "<parameter=", "</parameter>", "</function>", has_lines=True)
_SEED_TAGS = Tags("<function=", "<parameter=", "</parameter>", "</function>")
_INVOKE_TAGS = Tags('<invoke name="', '<parameter name="', "</parameter>", "</invoke>", '"')
_DSML = "<｜DSML｜"  # noqa: RUF001
_END_DSML = "</｜DSML｜"  # noqa: RUF001
_DSML_TAGS = Tags(
    f'{_DSML}invoke name="',
    f'{_DSML}parameter name="',
    f"{_END_DSML}parameter>",
    f"{_END_DSML}invoke>",
    '"',
)
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class _HermesBody:
    """JSON object, or a call in tags."""

    lists: bool = True

    def read(self, calls: CallReader) -> Reading[None]:
        if (yield from calls.reader.peek()) == "<" or calls.opener == "<function=":
            yield from TaggedBody(_FUNCTION_TAGS).read(calls)
        else:
            yield from JsonBody().read(calls)


HERMES = ToolCallFormat("hermes", ("<tool_call>",), _HermesBody(), ("</tool_call>",))
QWEN3_CODER = ToolCallFormat(
    "qwen3_coder", ("<tool_call>", "<function="), _HermesBody(), ("</tool_call>",)
)
LLAMA3_JSON = ToolCallFormat(
    "llama3_json",
    ("<|python_tag|>",),
    PythonBody(or_json=True),
    separators=",;",
    may_be_bare=True,
)
LLAMA4 = ToolCallFormat(
    "llama4",
    ("<|python_start|><|python_end|>", "<|python_start|>"),
    PythonBody(or_json=True),
    ("<|python_end|>",),
    separators=",;",
    may_be_bare=True,
)
FUNCTION_TAG = ToolCallFormat("function_tag", ("<function=",), TaggedBody(_SEED_TAGS))
# Mistral's templates accept only ids of nine letters and digits.
MISTRAL = ToolCallFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    MistralBody(),
    markers=("[ARGS]", "[CALL_ID]"),
    id_prefix="",
    id_length=9,
)
# Spelling of later Mistral models; the reader accepts both spellings.
MISTRAL_ARGS = replace(MISTRAL, name="mistral_args")
DEEPSEEK = ToolCallFormat(
    "deepseek",
    (_CALLS_BEGIN, _CALL_BEGIN),
    DeepSeekBody(),
    (_CALLS_END,),
    (_CALL_BEGIN,),
    (_CALL_END,),
    separators="",
    markers=(DEEPSEEK_SEPARATOR,),
)
# Spelling of V3 and R1; the reader accepts both spellings.
DEEPSEEK_V3 = replace(DEEPSEEK, name="deepseek_v3")
DEEPSEEK_DSML = ToolCallFormat(
    "deepseek_dsml",
    (f"{_DSML}function_calls>", f"{_DSML}tool_calls>"),
    TaggedBody(_DSML_TAGS),
    (f"{_END_DSML}function_calls>", f"{_END_DSML}tool_calls>"),
    separators="",
    markers=("｜DSML｜",),  # noqa: RUF001
)
KIMI_K2 = ToolCallFormat(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    KimiBody(),
    ("<|tool_calls_section_end|>",),
    ("<|tool_call_begin|>",),
    ("<|tool_call_end|>",),
    separators="",
    ends_reasoning=True,
    markers=("<|tool_call_argument_begin|>",),
)
_KEY_VALUE_MARKERS = (
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_sep>",
)
GLM = ToolCallFormat("glm", ("<tool_call>",), KeyValueBody(), markers=_KEY_VALUE_MARKERS)
HUNYUAN = ToolCallFormat(
    "hunyuan",
    ("<tool_calls>", "<tool_call>"),
    KeyValueBody(),
    ("</tool_calls>",),
    ("<tool_call>",),
    separators="",
    markers=_KEY_VALUE_MARKERS,
)
MINIMAX = ToolCallFormat(
    "minimax",
    ("<minimax:tool_call>",),
    TaggedBody(_INVOKE_TAGS),
    ("</minimax:tool_call>",),
    separators="",
)
TOOL_CALLS_TAG = ToolCallFormat(
    "tool_calls_tag", ("<tool_calls>",), JsonBody(), ("</tool_calls>",), separators=","
)
NEMOTRON = ToolCallFormat("nemotron", ("<TOOLCALL>",), JsonBody(), ("</TOOLCALL>",), separators=",")
GEMMA4 = ToolCallFormat(
    "gemma4", ("<|tool_call>",), TypedBody(GEMMA), ("<tool_call|>",), markers=('<|"|>',)
)
FUNCTION_GEMMA_CALLS = ToolCallFormat(
    "functiongemma",
    ("<start_function_call>",),
    TypedBody(FUNCTION_GEMMA),
    ("<end_function_call>",),
    markers=("<escape>",),
)
PHI4_MINI = ToolCallFormat(
    "phi4_mini", ("<|tool_call|>", "functools["), JsonBody(), ("<|/tool_call|>",), separators=","
)
GRANITE = ToolCallFormat(
    "granite",
    ("<|tool_call|>", "<function_call>"),
    JsonBody(),
    ("</function_call>",),
    separators=",",
)
COMMAND = ToolCallFormat("command", ("<|START_ACTION|>",), JsonBody(), ("<|END_ACTION|>",))
COMMAND_R = ToolCallFormat(
    "command_r",
    ("Action: ```json", "Action:```json", "Action:\n```json"),
    JsonBody(),
    ("```",),
)
INTERNLM2 = ToolCallFormat(
    "internlm2",
    ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    JsonBody(),
    ("<|action_end|>",),
    markers=("<|action_start|>", "<|plugin|>"),
)
SEED_OSS = ToolCallFormat(
    "seed_oss",
    ("<seed:tool_call>",),
    TaggedBody(_SEED_TAGS),
    ("</seed:tool_call>",),
    separators="",
)
LFM2 = ToolCallFormat(
    "lfm2",
    ("<|tool_call_start|>",),
    PythonBody(or_json=True),
    ("<|tool_call_end|>",),
    separators=",;",
)
OLMO3 = ToolCallFormat(
    "olmo3", ("<function_calls>",), PythonBody(), ("</function_calls>",), separators=",;"
)
APERTUS = ToolCallFormat("apertus", ("<|tools_prefix|>",), KeyedBody(), ("<|tools_suffix|>",))
GIGACHAT = ToolCallFormat(
    "gigachat",
    ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    JsonBody(),
    ("<|message_sep|>",),
    markers=("<|role_sep|>",),
)
GEMMA3 = ToolCallFormat(
    "gemma3",
    ("```tool_code\n", "```tool_call\n", "```tool_calls\n", "```json\n"),
    PythonBody(or_json=True),
    ("```",),
    separators=",;",
    may_be_bare=True,
    is_certain=False,
)
JSON = ToolCallFormat(
    "json",
    ("```json\n",),
    JsonBody(),
    ("```",),
    separators=",;",
    may_be_bare=True,
    is_certain=False,
)
# The messages of an answer have headers, which name the tool (`channels`).
HARMONY = ToolCallFormat(
    "harmony",
    (),
    JsonBody(),
    markers=(
        "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
        "<|return|>",
    ),
)  # fmt: skip

FORMATS = {
    each.name: each
    for each in (
        HERMES, QWEN3_CODER, LLAMA3_JSON, LLAMA4, FUNCTION_TAG, MISTRAL, MISTRAL_ARGS, DEEPSEEK,
        DEEPSEEK_V3, DEEPSEEK_DSML, KIMI_K2, GLM, HUNYUAN, MINIMAX, TOOL_CALLS_TAG, NEMOTRON,
        GEMMA3, GEMMA4, FUNCTION_GEMMA_CALLS, PHI4_MINI, GRANITE, COMMAND, COMMAND_R, INTERNLM2,
        SEED_OSS, LFM2, OLMO3, APERTUS, GIGACHAT, JSON, HARMONY,
    )
}  # fmt: skip

# Texts in chat templates that reveal the notation, the most specific first.
_REVEALING = (
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", MISTRAL),
    ("｜DSML｜", DEEPSEEK_DSML),  # noqa: RUF001
    ("<｜tool▁call", DEEPSEEK),  # noqa: RUF001
    ("<|tool_call_begin|>", KIMI_K2),
    ("<minimax:tool_call>", MINIMAX),
    ("<seed:tool_call>", SEED_OSS),
    ("<tool_sep>", HUNYUAN),
    ("<arg_key>", GLM),
    ("<|tool_call>", GEMMA4),
    ("<start_function_call>", FUNCTION_GEMMA_CALLS),
    ("<|START_ACTION|>", COMMAND),
    ("Action: ```json", COMMAND_R),
    ("Action:```json", COMMAND_R),
    ("'Action:' followed by a json-formatted list", COMMAND_R),
    ("\\'Action:\\' followed by a json-formatted list", COMMAND_R),
    ("<|action_start|>", INTERNLM2),
    ("<|tool_call_start|>", LFM2),
    ("<|tools_prefix|>", APERTUS),
    ("<function_calls>", OLMO3),
    ("<TOOLCALL>", NEMOTRON),
    ("<tool_calls>", TOOL_CALLS_TAG),
    ("<tool_call>", HERMES),
    ("<function=", FUNCTION_TAG),
    ("<|tool|>", PHI4_MINI),
    ("functools[", PHI4_MINI),
    ("<|function_call|>", GIGACHAT),
    ("<|role_sep|>", GIGACHAT),
    ("<|tool_call|>", GRANITE),
    ("<function_call>", GRANITE),
    ("<|python_start|>", LLAMA4),
    ("[func_name1(params_name1=", LLAMA4),
    ("<|python_tag|>", LLAMA3_JSON),
    ('"parameters": dictionary of argument name', LLAMA3_JSON),
    ("```tool_c", GEMMA3),
    ("<start_of_turn>", GEMMA3),
    ("<|im_middle|>", KIMI_K2),
    ("List of tools: ", LFM2),
)


_SPELLINGS = (
    ("<function=", HERMES, QWEN3_CODER),
    ("[ARGS]", MISTRAL, MISTRAL_ARGS),
    ("```json", DEEPSEEK, DEEPSEEK_V3),
)


def tool_calls_of(template: str) -> ToolCallFormat | None:
    """Returns the notation of calls that chat template `template` shows; None if it shows none."""
    found = next((found for text, found in _REVEALING if text in template), None)
    return None if found is None else spelled_in(template, found)


def spelled_in(template: str, found: ToolCallFormat) -> ToolCallFormat:
    """Returns `found` in the spelling that the template shows, if the family has several."""
    for text, general, special in _SPELLINGS:
        if found is general and text in template:
            return special
    return found
