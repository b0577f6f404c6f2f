"""Check whether the tool calls of a model's chat template can be read."""

from __future__ import annotations

import itertools
import re

from splitserve_text.answer_reader import ToolCallStart
from splitserve_text.call_formats import JSON, ToolCallFormat, tool_calls_of
from splitserve_text.errors import ChatTemplateFailed
from splitserve_text.output_parser import OutputFormat, OutputParser, ParserOptions
from splitserve_text.tokenizer import Tokenizer

_TOOLS = re.compile(r"\btools\b|\btool_calls\b")
_NAME = "probename"
_PARAMETERS = {"type": "object", "properties": {"probekey": {"type": "string"}}}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "", "parameters": _PARAMETERS},
}
_USER = {"role": "user", "content": "?"}
_FUNCTION = {"name": _NAME, "arguments": '{"probekey": "probevalue"}'}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "123456789", "type": "function", "function": _FUNCTION}],
}


def unread_calls(tokenizer: Tokenizer) -> str | None:
    """Returns the notation assumed for tool calls that the chat template writes in another one.

    None if its calls are read, or it takes no tools. Renders a call to find out.
    """
    template = tokenizer.chat_template_text
    if not _TOOLS.search(template):
        return None
    shown = tool_calls_of(template) or tokenizer.described_format.tool_calls
    written = _written_calls(tokenizer)
    if not written:
        # Some templates do not write the calls of earlier turns.
        return None if shown is not None else JSON.name
    assumed = shown or JSON
    return None if any(_is_read(text, assumed) for text in written) else assumed.name


def _written_calls(tokenizer: Tokenizer) -> list[str]:
    """Returns a call as the template writes it, with more or less text before; empty if it fails.

    A model's answer begins after the prompt. Without reasoning the template may write a call in
    another place.
    """
    try:
        chat = tokenizer.render_chat([_USER, _CALL], tools=[_TOOL], add_generation_prompt=False)
        prompts = [
            tokenizer.render_chat([_USER], tools=[_TOOL], add_generation_prompt=is_open)
            for is_open in (True, False)
        ]
    except ChatTemplateFailed:
        return []
    answers = [chat[_num_equal(prompt, chat) :] for prompt in prompts]
    return [answer for answer in answers if _NAME in answer]


def _num_equal(one: str, other: str) -> int:
    """Returns the length of the common beginning of two texts."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_read(text: str, tool_calls: ToolCallFormat) -> bool:
    parser = OutputParser(OutputFormat(tool_calls, None), ParserOptions(tools={_NAME: _PARAMETERS}))
    deltas = parser.push(text) + parser.finish()
    return any(isinstance(delta, ToolCallStart) for delta in deltas)
