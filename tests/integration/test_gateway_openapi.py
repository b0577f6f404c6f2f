"""Every request that openapi.json allows is accepted, field by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "one"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "one", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "one", "max_output_tokens": 1},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [1]},
}
# What else a request has when it has a field: that is told by words, and not by the schema.
TOGETHER: dict[str, Json] = {
    "echo": {},
    "best_of": {"n": 1},
    "length_penalty": {"use_beam_search": True},
    "early_stopping": {"use_beam_search": True},
    "min_tokens": {"max_tokens": 400, "max_output_tokens": 400},
    "messages": {"prompt": None},
    "prompt_token_ids": {"prompt": None, "messages": None},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "tool_choice": {"tools": [TOOL, {**TOOL, "function": {"name": "x"}}]},
    "continue_final_message": {"add_generation_prompt": False},
    "stream_options": {"stream": True},
}


# What this model, or a model at all, cannot do.
OF_THE_MODEL = (
    "is not served; available",
    "this model has no end-of-sequence token",
    "as the model has no encoder",
)


class Examples:
    """Values of a schema: its ends, each of its alternatives, each property alone."""

    def __init__(self, page: Json) -> None:
        self._schemas = page["components"]["schemas"]

    def of(self, schema: Json) -> Iterator[Any]:
        schema = self._resolved(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema and "properties" not in schema:
                for each in schema[key]:
                    yield from self.of({**each, **{k: v for k, v in schema.items() if k != key}})
                return
        if "const" in schema or "enum" in schema:
            yield from schema.get("enum", [schema.get("const")])
            return
        kinds = schema.get("type", ["null", "boolean", "integer", "string", "array", "object"])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            yield from getattr(self, f"_{kind}")(schema)

    def _resolved(self, schema: Json) -> Json:
        if "$ref" not in schema:
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**self._schemas[schema["$ref"].rpartition("/")[2]], **rest}

    def _null(self, _: Json) -> Iterator[None]:
        yield None

    def _boolean(self, _: Json) -> Iterator[bool]:
        yield from (False, True)

    def _integer(self, schema: Json) -> Iterator[int]:
        low = schema.get("minimum", -(2**31))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
        if (low, high) == (0, 2**31 - 1):
            # A token's: which there are is a matter of the model.
            high = 300
        yield from (low, high, min(max(low, 1), high))

    def _number(self, schema: Json) -> Iterator[float]:
        low: float = schema.get("minimum", -1e6)
        low = schema.get("exclusiveMinimum", low)
        high: float = schema.get("maximum", 1e6)
        yield from (low + (0.001 if "exclusiveMinimum" in schema else 0), high, (low + high) / 2)

    def _string(self, schema: Json) -> Iterator[str]:
        yield from schema.get("examples", ["x" * schema.get("minLength", 0), "x"])

    def _array(self, schema: Json) -> Iterator[list[Any]]:
        if schema.get("minItems", 0) == 0:
            yield []
        for item in self.of(schema.get("items", {"type": "string"})):
            yield [item]

    def _object(self, schema: Json) -> Iterator[Json]:
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        least = {name: next(self._used(properties[name])) for name in needed}
        yield least
        for name in properties:
            for value in islice(self.of(properties[name]), 3):
                yield {**least, name: value}

    def _used(self, schema: Json) -> Iterator[Any]:
        """Not null."""
        return (value for value in self.of(schema) if value is not None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("tokenizer"), max_model_len=512)
    async with running_gateway(executor, max_num_seqs=256) as running:
        yield running


@pytest.mark.cases(3)
@pytest.mark.parametrize("path", BODIES)
async def test_page_offers_only_what_is_accepted(gateway: RunningGateway, path: str) -> None:
    page = (await gateway.http.get("/openapi.json")).json()
    content = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    validator = jsonschema.Draft202012Validator({**content["schema"], **_components(page)})
    examples = Examples(page)
    schema = page["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    bodies = [
        body
        for name, field in schema["properties"].items()
        for value in examples.of(field)
        if validator.is_valid(body := with_field(path, schema, name, value))
    ]
    assert len(bodies) > 2 * len(schema["properties"])
    places = asyncio.Semaphore(16)

    async def refusal(body: Json) -> str:
        async with places:
            answer = await gateway.http.post(path, json=body)
        if answer.status_code == 200 or any(map(answer.text.__contains__, OF_THE_MODEL)):
            return ""
        return f"{body}: {answer.status_code} {answer.text}"

    refused = list(filter(None, await asyncio.gather(*map(refusal, bodies))))
    assert not refused, "\n".join(refused)


def with_field(path: str, schema: Json, name: str, value: object) -> Json:
    """A request that has the field, and what goes with it."""
    together = {k: v for k, v in TOGETHER.get(name, {}).items() if k in schema["properties"]}
    return {**BODIES[path], **together, name: value}


def _components(page: Json) -> Json:
    return {"components": page["components"]}
