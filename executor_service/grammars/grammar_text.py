"""A grammar of the contract in the language of llguidance."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from executor_service.steps.sampling_params import Grammar

# Whatever continues the text may be sampled, not only what the tokenizer would make of it.
_ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
_OPTIONS_KEY = "x-guidance"
# Between the tokens of JSON: nothing, a space, or the next line, indented. A small model that may
# go on with spaces does so until its sequence is cut.
_WHITE_SPACE = r"\x20|\n[\x20\x09]{0,32}"


class GrammarInvalid(Exception):
    """A grammar that cannot be compiled; the message says why."""


def grammar_text(grammar: Grammar) -> str:
    """For LLMatcher. Raises GrammarInvalid for a schema that is no JSON, or sets options."""
    if grammar.kind == "json_schema":
        output: dict[str, Any] = {"json_schema": _schema(grammar.texts[0])}
    elif grammar.kind == "regex":
        of_regex = json.loads(LLMatcher.grammar_from_regex(grammar.texts[0]))
        output = {"lark_grammar": of_regex["grammars"][0]["lark_grammar"]}
    elif grammar.kind == "lark":
        output = {"lark_grammar": grammar.texts[0]}
    else:
        # A terminal, which is one automaton however many choices there are.
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in grammar.texts)
        output = {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
    top = {"name": "top", "lark_grammar": f"{_ANY_TOKENS}start: @output"}
    return json.dumps({"grammars": [top, {"name": "output", **output}]}, ensure_ascii=False)


def _schema(text: str) -> dict[str, Any]:
    """With the options of the library in it."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = "too deep" if isinstance(error, RecursionError) else str(error)
        raise GrammarInvalid(f"the schema is no JSON: {message}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarInvalid("the schema is neither an object nor a boolean")
    if _OPTIONS_KEY in schema:
        # By these, what is not supported would be ignored.
        raise GrammarInvalid(f"the schema has {_OPTIONS_KEY}, which is not supported")
    return {**schema, _OPTIONS_KEY: {"whitespace_pattern": _WHITE_SPACE}}
