"""Structured output of real processes with the bundled model; an executor dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from splitserve_client import (
    AsyncClient,
    Choices,
    FinishReason,
    Generation,
    JsonSchema,
    Lark,
    Regex,
    RequestFailed,
    SamplingParams,
)
from splitserve_gateway.grammars import AnswerRules, GrammarChecker, plan_answer, tool_use
from splitserve_gateway.schemas import ChatFields
from splitserve_text import FORMATS, OutputFormat, ToolCallArguments, ToolCallStart
from tests.support.processes.processes import Processes, processes

MODEL = Path(__file__).parents[2] / "executor_service" / "bundled_model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "friends": {"type": "array", "items": {"enum": ["fox", "bear", "owl"]}, "maxItems": 3},
    },
    "required": ["name", "friends"],
    "additionalProperties": False,
}
GRAMMARS = (
    JsonSchema(json.dumps(SCHEMA)),
    Regex("Once upon a time, there (was|were) [a-z ]{3,40}\\."),
    Lark('start: "(" (start | WORD)* ")"\nWORD: /[a-z]{1,5}/\n'),
    Choices(("yes", "no", "perhaps")),
)
# Takes longer to compile than anybody waits.
ENDLESS = JsonSchema('{"type": "integer", "multipleOf": 9999991}')


@pytest.fixture(scope="module")
def stack() -> Iterator[Processes]:
    with processes(MODEL) as started:
        started.start_scheduler()
        started.start_executor()
        yield started


def params(grammar: object, seed: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.7, seed=seed, max_tokens=120, n=2, grammar=grammar)  # type: ignore[arg-type]


def complete_each(client: AsyncClient) -> list[asyncio.Task[Generation]]:
    prompts = [[5 + index, 6, 7] for index in range(len(GRAMMARS))]
    return [
        asyncio.create_task(client.complete(prompt, params(grammar)))
        for prompt, grammar in zip(prompts, GRAMMARS, strict=True)
    ]


async def complete_all(client: AsyncClient) -> list[Generation]:
    return list(await asyncio.gather(*complete_each(client)))


async def test_texts_follow_grammars_side_by_side(
    stack: Processes,
) -> None:
    await stack.run_executors(1)
    async with AsyncClient(stack.address) as client:
        # The process that tries grammars starts with the first one, for which all others wait.
        await client.complete([9, 8], params(Choices(("left", "right"))))
        endless = asyncio.create_task(client.complete([9, 8], params(ENDLESS)))
        completing = complete_each(client)
        first, _ = await asyncio.wait({endless, *completing}, return_when=asyncio.FIRST_COMPLETED)
        assert endless not in first
        generations = await asyncio.gather(*completing)
        tokenizer = await client.get_tokenizer()
        for grammar, generation in zip(GRAMMARS, generations, strict=True):
            for completion in generation.completions:
                text = tokenizer.decode(completion.token_ids)
                if completion.reason is FinishReason.STOP:
                    assert accepts(grammar, text), text
        stops = [c.reason for g in generations[1:] for c in g.completions]
        assert FinishReason.STOP in stops
        with pytest.raises(RequestFailed, match="processor time"):
            await endless


def accepts(grammar: object, text: str) -> bool:
    match grammar:
        case JsonSchema():
            value = json.loads(text)
            is_name = re.fullmatch("[A-Z][a-z]{1,8}", value["name"]) is not None
            return is_name and set(value["friends"]) <= {"fox", "bear", "owl"}
        case Regex():
            return re.fullmatch(grammar.pattern, text) is not None
        case Choices():
            return text in grammar.texts
        case _:
            return text[0] + text[-1] == "()" and text.count("(") == text.count(")")


POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "kind": {"type": ["string", "null"], "enum": ["a b", "c", None]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


async def test_calls_are_written_in_the_models_notation(stack: Processes) -> None:
    """The tokens of a real vocabulary spell each notation, and the parser reads the call."""
    await stack.run_executors(1)
    function = {"name": "point", "parameters": POINT}
    body = ChatFields.model_validate({"tools": [{"type": "function", "function": function}]})
    use = tool_use(body.tools, "required", is_parallel=False)
    checker = GrammarChecker()
    async with AsyncClient(stack.address) as client:
        tokenizer = await client.get_tokenizer()
        for name in ("qwen3_coder", "glm", "minimax", "deepseek_dsml", "olmo3", "gemma3"):
            form = OutputFormat(FORMATS[name], None)
            plan = await plan_answer(checker.of(""), AnswerRules(form, tool_use=use))
            sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=400, grammar=plan.grammar)
            (completion,) = (await client.complete([5, 6, 7], sampling)).completions
            assert completion.reason is FinishReason.STOP, name
            parser = plan.new_parser()
            parts = parser.push(tokenizer.decode(completion.token_ids)) + parser.finish()
            assert plan.output_format.tool_calls is form.tool_calls
            assert [part.name for part in parts if isinstance(part, ToolCallStart)] == ["point"]
            pieces = [part.text for part in parts if isinstance(part, ToolCallArguments)]
            jsonschema.validate(json.loads("".join(pieces)), POINT)
    await checker.close()


async def test_tokens_are_the_same_when_the_executor_dies_meanwhile(stack: Processes) -> None:
    await stack.run_executors(1)
    async with AsyncClient(stack.address) as client:
        expected = await complete_all(client)
        running = asyncio.create_task(complete_all(client))
        stream = client.generate([5, 6, 7], params(GRAMMARS[0]))
        async for _ in stream:
            break
        [address] = stack.executors
        stack.kill_executor(address)
        stack.start_executor()
        generations = await running
    found = [[c.token_ids for c in generation.completions] for generation in generations]
    assert found == [[c.token_ids for c in generation.completions] for generation in expected]
