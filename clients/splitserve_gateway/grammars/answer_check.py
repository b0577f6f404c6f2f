"""Checks of finished answers against the schemas that no grammar enforces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from splitserve_gateway.grammars.checker import TenantChecker
from splitserve_text import ContentDelta, Delta, ToolCallArguments, ToolCallStart


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Schemas that an answer should match and may not.

    `content`: of the content, as JSON text; None if any will do. `arguments`: of calls, by tool
    name.
    """

    checker: TenantChecker
    content: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)


class AnswerFinding:
    """Text of one answer, and what a check finds in it."""

    def __init__(self, check: AnswerCheck | None) -> None:
        """Begins with an empty text. `check`: None for an answer without a schema."""
        self._check = check
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, parts: Iterable[Delta]) -> None:
        """Adds the next parts of the answer."""
        if self._check is None:
            return
        for part in parts:
            match part:
                case ContentDelta(text):
                    self._content.append(text)
                case ToolCallStart(_, _, name):
                    self._calls.append((name, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)

    async def fields(self) -> dict[str, object]:
        """Returns the field `schema_problem` of the finished answer; none if nothing is to check.

        Its value is the first breach of a schema, or why that is unknown; None for a right answer.
        An answer with calls needs no content.
        """
        check = self._check
        if check is None:
            return {}
        texts: list[str] = []
        for index, (name, pieces) in enumerate(self._calls):
            if name in check.arguments:
                texts += [f"tool_calls.{index} ", check.arguments[name], "".join(pieces)]
        if check.content is not None and not self._calls:
            texts += ["", check.content, "".join(self._content)]
        return {"schema_problem": await check.checker.problem(texts)} if texts else {}
