"""Answers as the chat templates of model families render them: reasoning, content and calls.

Written by hand after the published templates of the families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]
Render = Callable[[Sequence[Call]], str]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, arguments: str = "arguments", name: str = "name") -> str:
    return f'{{"{name}": "{call[0]}", "{arguments}": {_json(call[1])}}}'


def _objects(first: str, last: str, between: str = ", ", arguments: str = "arguments") -> Render:
    return lambda calls: first + between.join(_object(call, arguments) for call in calls) + last


def _each(
    render: Callable[[Call], str], first: str = "", last: str = "", between: str = ""
) -> Render:
    return lambda calls: first + between.join(map(render, calls)) + last


def _text(value: object) -> str:
    """Text of a value in tags: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _tagged(call: Call, line: str = "\n") -> str:
    parameters = "".join(
        f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n"
        for key, value in call[1].items()
    )
    return f"<function={call[0]}>\n{parameters}</function>\n"


def _invoke(call: Call, dsml: str = "") -> str:
    parameters = "".join(
        f'<{dsml}parameter name="{key}"'
        + (f' string="{_json(isinstance(value, str))}"' if dsml else "")
        + f">{_text(value)}</{dsml}parameter>\n"
        for key, value in call[1].items()
    )
    return f'<{dsml}invoke name="{call[0]}">\n{parameters}</{dsml}invoke>\n'


def _keys_and_values(call: Call, line: str = "\n") -> str:
    return line.join(
        [
            call[0],
            *(
                f"<arg_key>{key}</arg_key>{line}<arg_value>{_text(value)}</arg_value>"
                for key, value in call[1].items()
            ),
            "</tool_call>",
        ]
    )


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _typed(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        members = ",".join(f"{key}:{_typed(item, quote)}" for key, item in value.items())
        return f"{{{members}}}"
    if isinstance(value, list):
        return f"[{','.join(_typed(item, quote) for item in value)}]"
    return _json(value)


def _harmony(call: Call) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json"
        f"<|message|>{_json(call[1])}<|call|>"
    )


def _deepseek(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_json(call[1])}<｜tool▁call▁end｜>"  # noqa: RUF001


def _deepseek_v3(call: Call) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n"  # noqa: RUF001
        f"```json\n{_json(call[1])}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
    )


_QUOTE = '<|"|>'
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DSML = "｜DSML｜"  # noqa: RUF001


def _kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{call[0]}:{index}"
        f"<|tool_call_argument_begin|>{_json(call[1])}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _command(calls: Sequence[Call]) -> str:
    written = ",\n".join(
        f'    {{"tool_call_id": "{index}", "tool_name": "{call[0]}", '
        f'"parameters": {_json(call[1])}}}'
        for index, call in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{written}\n]<|END_ACTION|>"


# Families with the name of their format, and how they write calls.
FAMILIES: dict[str, tuple[str, Render]] = {
    "Qwen 2.5, Qwen 3, Hermes": (
        "hermes",
        _each(lambda call: f"<tool_call>\n{_object(call)}\n</tool_call>", between="\n"),
    ),
    "Qwen3-Coder": (
        "qwen3_coder",
        _each(lambda call: f"<tool_call>\n{_tagged(call)}</tool_call>", between="\n"),
    ),
    "Qwen3-Coder without the outer tag": ("qwen3_coder", _each(_tagged)),
    "Llama 3.1": ("llama3_json", _objects("", "", "; ", "parameters")),
    "Llama 3.1 with python_tag": ("llama3_json", _objects("<|python_tag|>", "", "; ")),
    "Llama 3.2": ("llama3_json", _each(_python, "[", "]", ", ")),
    "Llama 3.1, built-in tools": (
        "llama3_json",
        lambda calls: (
            f"<|python_tag|>{_python((f'{calls[0][0]}.call', calls[0][1]))}"
            + "".join(f"<|python_tag|>{_python(call)}" for call in calls[1:])
        ),
    ),
    "Llama 4": ("llama4", _each(_python, "[", "]", ", ")),
    "Llama 4 with python_start": (
        "llama4",
        _each(_python, "<|python_start|>[", "]<|python_end|>", ", "),
    ),
    "Llama 4 in JSON": (
        "llama4",
        _objects("<|python_start|>", "<|python_end|>", "; ", "parameters"),
    ),
    "Functionary": (
        "function_tag",
        _each(lambda call: f"<function={call[0]}>{_json(call[1])}</function>"),
    ),
    "Mistral v3": ("mistral", _objects("[TOOL_CALLS] [", "]")),
    "Mistral v11, Magistral": (
        "mistral_args",
        _each(lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call[1])}"),
    ),
    "Mistral v13": (
        "mistral_args",
        _each(lambda call: f"[TOOL_CALLS]{call[0]}[CALL_ID]a1B2c3D4e[ARGS]{_json(call[1])}"),
    ),
    "DeepSeek V3, R1": ("deepseek_v3", _each(_deepseek_v3, *_CALLS, "\n")),
    "DeepSeek V3.1": ("deepseek", _each(_deepseek, *_CALLS)),
    "DeepSeek V3.2": (
        "deepseek_dsml",
        _each(
            lambda call: _invoke(call, _DSML),
            f"<{_DSML}function_calls>\n",
            f"</{_DSML}function_calls>",
        ),
    ),
    "Kimi K2": ("kimi_k2", _kimi),
    "GLM 4.5": ("glm", _each(lambda call: f"\n<tool_call>{_keys_and_values(call)}")),
    "GLM 4.7": ("glm", _each(lambda call: f"<tool_call>{_keys_and_values(call, '')}")),
    "MiniMax M1": ("tool_calls_tag", _objects("<tool_calls>\n", "\n</tool_calls>", "\n")),
    "MiniMax M2": ("minimax", _each(_invoke, "<minimax:tool_call>\n", "</minimax:tool_call>")),
    "Hunyuan A13B, Jamba, Apriel": ("tool_calls_tag", _objects("<tool_calls>[", "]</tool_calls>")),
    "Hunyuan with tags": (
        "hunyuan",
        _each(
            lambda call: "<tool_call>" + _keys_and_values((f"{call[0]}<tool_sep>", call[1])),
            "<tool_calls>\n",
            "\n</tool_calls>",
            "\n",
        ),
    ),
    "Nemotron": ("nemotron", _objects("<TOOLCALL>[", "]</TOOLCALL>")),
    "Gemma 3 in a fence": ("gemma3", _each(_python, "```tool_code\n", "\n```", "\n")),
    "Gemma 4": (
        "gemma4",
        _each(lambda call: f"<|tool_call>call:{call[0]}{_typed(call[1], _QUOTE)}<tool_call|>"),
    ),
    "FunctionGemma": (
        "functiongemma",
        _each(
            lambda call: (
                f"<start_function_call>call:{call[0]}{_typed(call[1], '<escape>')}"
                "<end_function_call>"
            )
        ),
    ),
    "Phi-4-mini": ("phi4_mini", _objects("<|tool_call|>[", "]<|/tool_call|>")),
    "Phi-4-mini, functools": ("phi4_mini", _objects("functools[", "]")),
    "Granite 3": ("granite", _objects("<|tool_call|>[", "]")),
    "Granite 20B": ("granite", _each(lambda call: f"<function_call> {_object(call)} ")),
    "Granite 4": (
        "hermes",
        _each(lambda call: f"<tool_call>\n{_object(call)}\n</tool_call>", between="\n"),
    ),
    "Command R7B, Command A": ("command", _command),
    "Command R": (
        "command_r",
        lambda calls: (
            "Action: ```json\n"
            + json.dumps(
                [{"tool_name": name, "parameters": value} for name, value in calls], indent=4
            )
            + "\n```"
        ),
    ),
    "Command R, as its template writes past calls": (
        "command_r",
        lambda calls: (
            "Action:\n```json\n["
            + ",\n".join(_object(call, "parameters", "tool_name") for call in calls)
            + "]```"
        ),
    ),
    "InternLM 2": (
        "internlm2",
        _each(
            lambda call: (
                f"<|action_start|><|plugin|>\n{_object(call, 'parameters')}<|action_end|>\n"
            )
        ),
    ),
    "Seed-OSS": (
        "seed_oss",
        _each(lambda call: f"\n<seed:tool_call>\n{_tagged(call, '')}</seed:tool_call>"),
    ),
    "LFM 2": ("lfm2", _each(_python, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")),
    "Olmo 3": ("olmo3", _each(_python, "<function_calls>", "</function_calls>", "\n")),
    "ERNIE 4.5": (
        "hermes",
        _each(lambda call: f"\n<tool_call>\n{_object(call)}\n</tool_call>\n"),
    ),
    "Apertus": (
        "apertus",
        _each(
            lambda call: f'{{"{call[0]}": {_json(call[1])}}}',
            "<|tools_prefix|>[",
            "]<|tools_suffix|>",
            ", ",
        ),
    ),
    "GigaChat 3": (
        "gigachat",
        _each(
            lambda call: (
                f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(call)}<|message_sep|>\n\n"
            )
        ),
    ),
    "GigaChat 3.1": (
        "gigachat",
        _each(lambda call: f"<|function_call|>{_object(call)}<|message_sep|>\n\n"),
    ),
    "fence of JSON": ("json", lambda calls: f"```json\n[{', '.join(map(_object, calls))}]\n```"),
    "JSON": ("json", _objects("[", "]")),
    "JSON as in OpenAI's API": (
        "json",
        _each(
            lambda call: f'{{"id": "1", "type": "function", "function": {_object(call)}}}',
            "[",
            "]",
            ", ",
        ),
    ),
    "gpt-oss": ("harmony", _each(_harmony)),
}

# Reasoning by the name of its marks.
REASONED = {
    "think": "<think>\n{}</think>\n\n",
    "think_answer": "<think>\n{}</think>\n",
    "mistral": "[THINK]{}[/THINK]",
    "seed": "<seed:think>{}</seed:think>\n",
    "command": "<|START_THINKING|>{}<|END_THINKING|>",
    "granite": "Here is my thought process: {}Here is my response: ",
    "gemma4": "<|channel>thought\n{}<channel|>",
    "kimi_vl": "◁think▷{}◁/think▷",
    "apriel": "Here are my reasoning steps:\n{}\n[BEGIN FINAL RESPONSE]\n",
    "harmony": "<|channel|>analysis<|message|>{}<|end|>",
}
