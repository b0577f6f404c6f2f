"""The official Node package: its own parsing, helpers and errors, before a real model.

What the gateway answers to any client is tested with the Python package. The calls are in
`node/openai_calls.mjs`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.stack import ServedModel
from tests.clients.stories import GREETING, STORY
from tests.support.processes.patience import PATIENCE_S

NODE = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")

OSLO = {"city": "Oslo"}
# The result of the schema's own validation.
PARSED = {"inCity": "Oslo"}

ANSWERED = {
    "model": "model",
    "chat_streamed": [STORY, ["length"], [[], 18]],
    "chat_choices_streamed": [True] * 3,
    "helper_events": [GREETING, GREETING, GREETING, 23, True],
    "helper_iterated": [GREETING, GREETING, "stop"],
    "structured": PARSED,
    "structured_and_streamed": PARSED,
    "structured_and_cut_off": "LengthFinishReasonError",
    "response_streamed": [GREETING, GREETING, "completed"],
    "response_structured": PARSED,
    "response_named_tool": [["function_call", "get_weather", OSLO]],
    "response_tool_streamed": [OSLO, True, [["get_weather", True]]],
    "tool_parsed": [PARSED],
    "tool_streamed": ["get_weather", OSLO, True, "tool_calls"],
    "run_tools_once": ['{"sky":"rain"}', ["Oslo"]],
    "run_tools_twice": [["user", "assistant", "tool", "assistant", "tool"], ["Oslo"] * 2],
    "run_tools_streamed": [["get_weather"] * 2, ["Oslo"] * 2],
    "run_tools_until_text": "Once upon a time",
}
# Class, status, param, code.
REFUSED = {
    "unknown_model_streamed": ["NotFoundError", 404, "model", "model_not_found"],
    "unknown_model_retrieved": ["NotFoundError", 404, "model", "model_not_found"],
    "unknown_path": ["NotFoundError", 404, None, "not_found"],
    "bad_field_within": ["BadRequestError", 400, "messages.0.colour", "unknown_field"],
    "bad_schema": ["BadRequestError", 400, "response_format.json_schema.schema", "invalid_grammar"],
    "kept_response": ["BadRequestError", 400, "previous_response_id", "unsupported_field"],
    "helper_refused": ["BadRequestError", 400, "top_p", "sampling_params_invalid"],
    "nobody_there": ["APIConnectionError", None, None, None],
}


@pytest.fixture(scope="module")
def came(served: ServedModel) -> Mapping[str, object]:
    """Returns the outcome of each call."""
    assert (NODE / "node_modules").exists(), "its packages are not installed: make node"
    done = subprocess.run(
        ["node", NODE / "openai_calls.mjs", served.base_url, served.model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, object] = json.loads(done.stdout)
    return outcomes


@pytest.mark.parametrize("call", ANSWERED)
def test_node_gets_what_it_asks_for(came: Mapping[str, object], call: str) -> None:
    assert came[call] == ANSWERED[call]


@pytest.mark.parametrize("call", REFUSED)
def test_node_throws_the_reason_when_a_request_is_refused(
    came: Mapping[str, object], call: str
) -> None:
    assert came[call] == REFUSED[call]


def test_node_lists_the_model(came: Mapping[str, object], served: ServedModel) -> None:
    assert came["models"] == [served.model]


def test_all_calls_of_node_are_compared(came: Mapping[str, object]) -> None:
    assert came.keys() == ANSWERED.keys() | REFUSED.keys() | {"models"}
