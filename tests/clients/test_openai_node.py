"""The official Node package drives the surface, before a real model.

Texts are those that vLLM's server gives, which serves the same model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.stack import MODEL, ServedModel
from tests.clients.stories import CONTINUATION, GREETING, STORY

NODE = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").exists(), reason="make node"
)

CALLED = [["get_weather", {"city": "Oslo"}]]
EXPECTED = {
    "models": [MODEL],
    "chat": ["assistant", STORY, "length", 18],
    "chatStream": [STORY, 18],
    "chatStreamHelper": [GREETING, GREETING, "stop"],
    "chatLogprobs": [["Once", 2], [" upon", 2], [" a", 2]],
    "completion": [CONTINUATION, " was a grumpy robot who lived"],
    "completionStream": CONTINUATION,
    "structured": {"city": "Oslo"},
    "tools": CALLED,
    "toolsStreamed": CALLED,
    "toolsRun": ["rain in Oslo"],
    "response": [GREETING, "completed"],
    "responseStream": [GREETING, GREETING],
    "responseTools": CALLED,
    "streamLeft": "assistant",
    "unknownModel": ["NotFoundError", 404, "model", "model_not_found"],
    "badField": ["BadRequestError", 400, "temperature", "sampling_params_invalid"],
    "tooLong": ["BadRequestError", 400, "prompt", "context_length_exceeded"],
    "nobodyThere": ["APIConnectionError", None, None, None],
}


def test_node_gets_what_it_asks_for(served: ServedModel) -> None:
    done = subprocess.run(
        ["node", NODE / "openai_calls.mjs", served.base_url, served.model],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    assert json.loads(done.stdout) == EXPECTED
