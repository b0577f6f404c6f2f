"""Schemas of tools that cannot be compiled, alone or together."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve_gateway.grammars import GrammarChecker, GrammarRefused, Source
from splitserve_text import Grammar, JsonSchema, Lark
from tests.unit.gateway.grammars.answer_rules import (
    POINT,
    WRITTEN,
    grammar_of,
    rules,
    tools,
    use_of,
)
from tests.unit.gateway.grammars.byte_model import accepts

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_schema_is_any_object_when_not_compilable_nor_strict(
    checker: GrammarChecker,
) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    asked = rules("hermes", use_of(tools(odd=odd, point=POINT), "required", None))
    grammar = await grammar_of(checker, asked)
    text = '<tool_call>\n{"name": "odd", "arguments": {"b": [1]}}\n</tool_call>'

    assert accepts(grammar, text)
    assert accepts(grammar, WRITTEN["hermes"])
    assert not accepts(grammar, WRITTEN["hermes"].replace("1", "[1]"))


async def test_schema_holds_as_far_as_it_compiles_when_not_strict(checker: GrammarChecker) -> None:
    odd = {**POINT, "not": {"required": ["a"]}}
    grammar = await grammar_of(checker, rules("hermes", use_of(tools(odd=odd), "required", None)))
    text = '<tool_call>\n{"name": "odd", "arguments": %s}\n</tool_call>'

    assert accepts(grammar, text % '{"x": 3}')
    assert not accepts(grammar, text % '{"x": "3"}')


async def test_schema_is_refused_by_its_field_when_strict(checker: GrammarChecker) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    for choice in ("required", "auto"):
        asked = rules("hermes", use_of(tools(strict=True, p=POINT, odd=odd), choice, None))
        with pytest.raises(GrammarRefused, match="not") as refused:
            await grammar_of(checker, asked)
        assert refused.value.field == "tools.1.function.parameters"


class RefusingChecker(GrammarChecker):
    """Refuses what has "odd" in it, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0

    async def check(self, field: str, source: Source, tenant: str = "") -> Grammar:
        assert isinstance(source, JsonSchema | Lark)
        if "odd" in (source.grammar if isinstance(source, Lark) else source.schema):
            self.num_refused += 1
            raise GrammarRefused(field, "odd")
        return source


async def test_refused_schemas_cost_no_more_when_there_are_many() -> None:
    odd = {"type": "object", "properties": {"odd": {}}, "required": ["odd"]}
    many: dict[str, Any] = {f"f{index}": odd for index in range(20)} | {"point": POINT}
    checker = RefusingChecker()
    grammar = await grammar_of(checker, rules("json", use_of(tools(**many), "required", False)))

    assert accepts(grammar, '{"name": "f19", "arguments": {"b": 1}}')
    assert checker.num_refused == 4


async def test_schemas_are_any_object_when_they_are_too_large_together(
    checker: GrammarChecker,
) -> None:
    many: dict[str, Any] = {
        f"f{index}": {
            "type": "object",
            "properties": {"a": {"enum": [str(index) * 20_000]}},
            "required": ["a"],
        }
        for index in range(5)
    }
    grammar = await grammar_of(checker, rules("json", use_of(tools(**many), "required", None)))

    assert accepts(grammar, '[{"name": "f3", "arguments": {}}]')
    use = use_of(tools(strict=True, **many), "required", None)
    with pytest.raises(GrammarRefused) as refused:
        await grammar_of(checker, rules("json", use))
    assert refused.value.field == "tools"


async def test_call_is_refused_when_the_notation_is_not_known(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await grammar_of(checker, rules("none", use_of(tools(), "required", None)))
    assert refused.value.field == "tool_choice"
