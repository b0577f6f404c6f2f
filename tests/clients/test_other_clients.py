"""LangChain's and LiteLLM's clients do with the gateway what they do with other servers.

They run in a venv of their own. The texts are those that vLLM's server gives the same calls.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.stack import ServedModel
from tests.support.processes.processes import ROOT

PYTHON = ROOT / ".tools" / "clients" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .tools/clients/.ready")

STORY = "Once upon a time, there was a"
USAGE = {"input_tokens": 18, "output_tokens": 8, "total_tokens": 26}
CALLED = [["get_weather", {"city": "Oslo"}]]

LANGCHAIN = {
    "batch": [STORY, STORY],
    "ainvoke": STORY,
    "logprobs": ["Once", " upon", " a", " time", ",", " there", " was", " a"],
    "stop": "Once upon a ",
    "complete": ", a funny lamb named Ravi",
    "tools": CALLED,
    "tools_streamed": CALLED,
    "tools_answered": [["rain in Oslo"], True],
    "structured_by_schema": "Oslo",
    "structured_by_tool": "Oslo",
    "responses": [STORY],
}
LITELLM = {
    "completion": [STORY, 26, "length"],
    "streamed": STORY,
    "streamed_with_usage": [STORY, 26],
    "asynchronous": STORY,
    "asynchronously_streamed": STORY,
    "text": ", a funny lamb named Ravi lived near",
    "tools": CALLED,
    "structured": {"city": "Oslo"},
    "unknown_model": 404,
}


def run(script: str, served: ServedModel) -> dict[str, object]:
    """What each call of `script` came to."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name(script), served.base_url, served.model],
        # Or it asks the network what models cost.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    came: dict[str, object] = json.loads(done.stdout)
    return came


@pytest.fixture(scope="module")
def langchain(served: ServedModel) -> Mapping[str, object]:
    return run("langchain_calls.py", served)


@pytest.fixture(scope="module")
def litellm(served: ServedModel) -> Mapping[str, object]:
    return run("litellm_calls.py", served)


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_langchain_gets_text_usage_and_reason_when_it_asks(
    langchain: Mapping[str, object], call: str
) -> None:
    answer = langchain[call]
    assert isinstance(answer, list), answer
    text, usage, reason = answer

    assert (text, reason) == (STORY, "length")
    assert {name: usage[name] for name in USAGE} == USAGE


@pytest.mark.parametrize("call", LANGCHAIN)
def test_langchain_gets_what_it_asks_for(langchain: Mapping[str, object], call: str) -> None:
    assert langchain[call] == LANGCHAIN[call]


@pytest.mark.parametrize("call", LITELLM)
def test_litellm_gets_what_it_asks_for(litellm: Mapping[str, object], call: str) -> None:
    assert litellm[call] == LITELLM[call]


def test_all_calls_are_compared(
    langchain: Mapping[str, object], litellm: Mapping[str, object]
) -> None:
    assert langchain.keys() == LANGCHAIN.keys() | {"invoke", "stream"}
    assert litellm.keys() == LITELLM.keys()
