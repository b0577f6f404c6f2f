"""Tools, rules and expected notations for tests of answer grammars."""

from __future__ import annotations

from typing import Any

from splitserve_gateway.grammars import (
    AnswerPlan,
    AnswerRules,
    GrammarChecker,
    ToolUse,
    plan_answer,
    tool_use,
)
from splitserve_gateway.schemas import ChatFields
from splitserve_text import FORMATS, REASONING_MARKS, Grammar, OutputFormat
from tests.unit.text.parsing.answers import Answer

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"enum": ["a", "<b>", '"']}},
    "required": ["x"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "boolean"}},
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"point": POINT, "tree": TREE}

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "point", "arguments": {"x": 1}}\n</tool_call>',
    "llama3_json": '{"name": "point", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "point", "arguments": {"x": 1}}]',
    "mistral_args": '[TOOL_CALLS]point[ARGS]{"x": 1}',
    "json": '{"name": "point", "arguments": {"x": 1}}',
    "qwen3_coder": "<tool_call>\n<function=point>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>point\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "hunyuan": "<tool_calls>\n<tool_call>point<tool_sep>\n<arg_key>x</arg_key>\n"
    "<arg_value>1</arg_value>\n</tool_call>\n</tool_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="point">\n<parameter name="x">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=point>\n<parameter=x>1</parameter>\n</function>\n"
    "</seed:tool_call>",
    "deepseek_dsml": "<｜DSML｜function_calls>\n"  # noqa: RUF001
    '<｜DSML｜invoke name="point">\n'  # noqa: RUF001
    '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'  # noqa: RUF001
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",  # noqa: RUF001
    "olmo3": "<function_calls>point(x=1)</function_calls>",
    "gemma3": "```tool_code\npoint(x=1)\n```",
    "gemma4": "<|tool_call>call:point{x:1}<tool_call|>",
    "functiongemma": "<start_function_call>call:point{x:1}<end_function_call>",
    "llama4": '{"name": "point", "parameters": {"x": 1}}',
    "function_tag": '<function=point>{"x": 1}</function>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>point"  # noqa: RUF001
    '<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"  # noqa: RUF001
    '<｜tool▁sep｜>point\n```json\n{"x": 1}\n```'  # noqa: RUF001
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.point:0"
    '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "tool_calls_tag": '<tool_calls>[{"name": "point", "arguments": {"x": 1}}]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "point", "arguments": {"x": 1}}]</TOOLCALL>',
    "phi4_mini": '<|tool_call|>[{"name": "point", "arguments": {"x": 1}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "point", "arguments": {"x": 1}}]',
    "lfm2": '<|tool_call_start|>[{"name": "point", "arguments": {"x": 1}}]<|tool_call_end|>',
    "apertus": '<|tools_prefix|>[{"point": {"x": 1}}]<|tools_suffix|>',
}


def tools(*, strict: bool = False, **schemas: object) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": schema, "strict": strict},
        }
        for name, schema in (schemas or SCHEMAS).items()
    ]


def rules(
    format_name: str,
    use: ToolUse,
    reasoning: str = "none",
    **more: Any,  # noqa: ANN401
) -> AnswerRules:
    form = OutputFormat(FORMATS.get(format_name), REASONING_MARKS.get(reasoning))
    return AnswerRules(form, tool_use=use, **more)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


async def grammar_of(checker: GrammarChecker, asked: AnswerRules) -> Grammar:
    plan = await plan_answer(checker.of(""), asked)
    assert plan.grammar is not None
    return plan.grammar


def read(text: str, plan: AnswerPlan) -> Answer:
    parser = plan.new_parser()
    answer = Answer()
    for delta in [delta for char in text for delta in parser.push(char)] + parser.finish():
        answer.add(delta)
    return answer


def use_of(tools: object, choice: object = None, parallel: bool | None = None) -> ToolUse:
    """Raises what reading and understanding them raises."""
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = ChatFields.model_validate(fields)
    return tool_use(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls)
