"""Check whether the tool calls of a model's chat template can be read."""

from __future__ import annotations

import re

from splitserve_text.answer_reader import ToolCallStart
from splitserve_text.call_formats import JSON, tool_calls_of
from splitserve_text.errors import ChatTemplateFailed
from splitserve_text.output_parser import OutputFormat, OutputParser, ParserOptions
from splitserve_text.tokenizer import Tokenizer

_TOOLS = re.compile(r"\btools\b|\btool_calls\b")
_NAME = "probename"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_USER = {"role": "user", "content": "?"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": _NAME, "arguments": "{}"}}
    ],
}


def has_unknown_calls(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template takes tools but writes calls in an unknown notation.

    Renders the template if it shows no known notation: calls may be plain JSON.
    """
    template = tokenizer.chat_template_text
    shown = tool_calls_of(template) or tokenizer.described_format.tool_calls
    if not _TOOLS.search(template) or shown is not None:
        return False
    try:
        prompt = tokenizer.render_chat([_USER], tools=[_TOOL])
        chat = tokenizer.render_chat([_USER, _CALL], tools=[_TOOL], add_generation_prompt=False)
    except ChatTemplateFailed:
        return True
    parser = OutputParser(OutputFormat(JSON, None), ParserOptions(tools={_NAME: {}}))
    deltas = parser.push(chat.removeprefix(prompt)) + parser.finish()
    return not any(isinstance(delta, ToolCallStart) for delta in deltas)
