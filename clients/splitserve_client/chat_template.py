"""Chat templates as Hugging Face models carry them: Jinja in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from splitserve_client.errors import ChatTemplateFailed

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages into the text a model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatTemplateFailed if `source` is no valid template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateFailed(f"the model's chat template is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """The text for `messages`. Raises ChatTemplateFailed with what the template says."""
        values: dict[str, object] = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateFailed(f"the model's chat template refuses: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
