"""The official Node package drives the whole surface, before a real model.

Texts are those that the Python package gets. What is asked: `node/*_calls.mjs`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.stack import ServedModel
from tests.clients.stories import CONTINUATION, GREETING, PROMPT, STORY
from tests.support.processes.patience import PATIENCE_S

NODE = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")

OSLO = {"city": "Oslo"}
# As the schema's own validation turns it.
PARSED = {"inCity": "Oslo"}
CALLED = [[["function", "get_weather", OSLO]], "tool_calls"]
RESPONSE_CALLED = [["function_call", "get_weather", OSLO]]

ANSWERED = {
    "model": "model",
    "chat": [["chat.completion", True, 0, "assistant", STORY], ["length", 12, 6, 18]],
    "chat_streamed": ["assistant", STORY, ["length"], [[], 18], 1],
    "chat_choices": [[0, 1, 2], 3],
    "chat_choices_streamed": [True] * 3,
    "chat_logprobs": [STORY, [True] * 6],
    "chat_stopped": ["Once upon a ", "stop"],
    "chat_extra_fields": [STORY, 6],
    "chat_goes_on_with_an_answer": True,
    "chat_ignored_field": "metadata",
    "helper_events": [GREETING, GREETING, GREETING, 23, True],
    "helper_iterated": [GREETING, GREETING, "stop"],
    "structured": [OSLO, "stop"],
    "structured_by_helper": PARSED,
    "structured_and_streamed": PARSED,
    "structured_and_cut_off": "LengthFinishReasonError",
    "json_object": "{",
    "completion": ["text_completion", CONTINUATION, "length", 10],
    "completion_streamed": [CONTINUATION, [], 10],
    "completion_of_several_prompts": [
        [0, CONTINUATION],
        [1, " was a grumpy robot who lived"],
        [2, CONTINUATION],
    ],
    "completion_echoed": [
        f"{PROMPT}, a",
        ["Once", " upon", " a", " time", ",", " a"],
        [0, 4, 9, 11, 16, 17],
        None,
        True,
    ],
    "response": ["response", "completed", GREETING, 23, True],
    "response_cut_off": ["incomplete", {"reason": "max_output_tokens"}, 16],
    "response_streamed": [["response.created", "response.completed"], GREETING, True],
    "response_by_helper": [GREETING, GREETING, "completed"],
    "response_goes_on_with_items": [True, True],
    "response_structured": OSLO,
    "response_structured_by_helper": PARSED,
    "response_tool": RESPONSE_CALLED,
    "response_named_tool": RESPONSE_CALLED,
    "response_tool_streamed": [OSLO, True, [["get_weather", True]]],
    "response_tool_answered": ["message", True],
    "tool_required": CALLED,
    "tool_named": CALLED,
    "tool_auto": CALLED,
    "tool_auto_but_text": [STORY, None],
    "tool_parsed": [PARSED],
    "tool_streamed": [CALLED, True, "get_weather"],
    "tool_answered": ["assistant", True],
    "run_tools_once": ['{"sky":"rain"}', ["Oslo"]],
    "run_tools_twice": [["user", "assistant", "tool", "assistant", "tool"], ["Oslo"] * 2],
    "run_tools_streamed": [["get_weather"] * 2, ["Oslo"] * 2],
    "run_tools_until_text": "Once upon a time",
}
# Class, status, param, code.
REFUSED = {
    "unknown_model": ["NotFoundError", 404, "model", "model_not_found"],
    "unknown_model_streamed": ["NotFoundError", 404, "model", "model_not_found"],
    "unknown_model_retrieved": ["NotFoundError", 404, "model", "model_not_found"],
    "unknown_path": ["NotFoundError", 404, None, "not_found"],
    "bad_value": ["BadRequestError", 400, "temperature", "sampling_params_invalid"],
    "bad_type": ["BadRequestError", 400, "max_tokens", "invalid_value"],
    "bad_field_within": ["BadRequestError", 400, "messages.0.colour", "unknown_field"],
    "unknown_field": ["BadRequestError", 400, "no_such_field", "unknown_field"],
    "tool_without_tools": ["BadRequestError", 400, "tool_choice", "invalid_value"],
    "bad_schema": [
        "BadRequestError",
        400,
        "response_format.json_schema.schema",
        "invalid_grammar",
    ],
    "long_prompt": ["BadRequestError", 400, "prompt", "context_length_exceeded"],
    "long_prompt_streamed": ["BadRequestError", 400, "prompt", "context_length_exceeded"],
    "kept_response": ["BadRequestError", 400, "previous_response_id", "unsupported_field"],
    "helper_refused": ["BadRequestError", 400, "top_p", "sampling_params_invalid"],
    "nobody_there": ["APIConnectionError", None, None, None],
}


@pytest.fixture(scope="module")
def came(served: ServedModel) -> Mapping[str, object]:
    """What each call came to."""
    assert (NODE / "node_modules").exists(), "its packages are not there: make node"
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
def test_node_throws_what_says_why_when_a_request_is_refused(
    came: Mapping[str, object], call: str
) -> None:
    assert came[call] == REFUSED[call]


def test_node_lists_the_model(came: Mapping[str, object], served: ServedModel) -> None:
    assert came["models"] == [served.model]


def test_all_calls_of_node_are_compared(came: Mapping[str, object]) -> None:
    assert came.keys() == ANSWERED.keys() | REFUSED.keys() | {"models"}
