"""LangChain's and LiteLLM's clients do with the gateway what they do with other servers.

They run in a venv of their own. The texts are those that vLLM's server gives the same calls.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.stack import ServedModel
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S

CLIENTS = ROOT / ".tools" / "clients"
pytestmark = pytest.mark.skipif(
    not (CLIENTS / ".ready").exists(), reason="they are not installed: make .tools/clients/.ready"
)

STORY = "Once upon a time, there was a"
TOLD = [STORY, 26, "length"]
CALLED = [["get_weather", {"city": "Oslo"}]]

LANGCHAIN = {
    "invoke": TOLD,
    "stream": TOLD,
    "logprobs": ["Once", " upon", " a", " time", ",", " there", " was", " a"],
    "stop": "Once upon a ",
    "complete": ", a funny lamb named Ravi",
    "tools_streamed": CALLED,
    "tools_answered": [["rain in Oslo"], True],
    "structured_by_schema": "Oslo",
    "responses": [STORY],
}
LITELLM = {
    "completion": TOLD,
    "streamed_with_usage": [STORY, 26],
    "asynchronously_streamed": STORY,
    "text": ", a funny lamb named Ravi lived near",
    "tools": CALLED,
    "structured": {"city": "Oslo"},
    "unknown_model": 404,
    "overflow": 400,
}


def run(script: str, served: ServedModel) -> dict[str, object]:
    """What each call of `script` came to."""
    done = subprocess.run(
        [
            CLIENTS / "bin" / "python",
            Path(__file__).with_name(script),
            served.base_url,
            served.model,
        ],
        # Or it asks the network what models cost.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    came: dict[str, object] = json.loads(done.stdout)
    return came


def test_langchain_gets_what_it_asks_for(served: ServedModel) -> None:
    assert run("langchain_calls.py", served) == LANGCHAIN


def test_litellm_gets_what_it_asks_for(served: ServedModel) -> None:
    assert run("litellm_calls.py", served) == LITELLM
