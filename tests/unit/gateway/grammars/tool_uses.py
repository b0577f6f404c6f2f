"""What a chat's fields say of tools."""

from __future__ import annotations

from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.schemas.chat import ChatFields


def use_of(tools: object, choice: object = None, parallel: bool | None = None) -> ToolUse:
    """Raises what reading and understanding them raises."""
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = ChatFields.model_validate(fields)
    return tool_use(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls)
