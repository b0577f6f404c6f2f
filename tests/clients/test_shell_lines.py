"""The lines with `grpcurl` and `curl` in our documents run as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from splitserve_client import Client, SamplingParams
from tests.clients.stack import ServedModel
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S, PATIENT

DOCUMENTS = ("README.md", "docs/client.md", "docs/openai.md", "docs/anthropic.md")
# Where `make` puts grpcurl. One of the system's own comes first.
PATH = f"{os.environ['PATH']}:{ROOT / '.tools' / 'clients' / 'bin'}"
# Nothing but the answer, and a status of 400 or above is a failure.
CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


@dataclass(frozen=True, slots=True)
class Line:
    document: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.text.split())}"

    @property
    def program(self) -> str:
        return self.text.partition(" ")[0]


def shown_lines() -> list[Line]:
    """Commands of the programs in blocks of code, with the lines that continue them."""
    return [
        Line(document, command)
        for document in DOCUMENTS
        if (ROOT / document).exists()
        for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
        for command in re.split(r"(?<!\\)\n", block)
        if command.startswith(("grpcurl ", "curl "))
    ]


def run(command: str, served: ServedModel) -> str:
    """What `command` writes, with the addresses that serve replaced by those here."""
    command = re.sub(r"(localhost|127\.0\.0\.1):50051", served.scheduler, command)
    command = re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", served.base_url, command)
    done = subprocess.run(
        ["bash", "-c", CURL + command],
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("line", shown_lines(), ids=str)
def test_line_works_when_it_is_typed(line: Line, served: ServedModel) -> None:
    if shutil.which(line.program, path=PATH) is None:
        pytest.skip(f"there is no {line.program}; `make test` installs grpcurl where it can")

    assert run(line.text, served).strip() != ""


@pytest.mark.skipif(shutil.which("grpcurl", path=PATH) is None, reason="there is no grpcurl")
def test_grpcurl_generates_what_the_python_client_does(served: ServedModel) -> None:
    (line,) = [item for item in shown_lines() if "/Generate" in item.text and "client" in str(item)]
    greedy = line.text.replace('"max_tokens"', '"temperature":0,"max_tokens"')
    decoder = json.JSONDecoder()
    token_ids: list[int] = []

    said = run(greedy, served).strip()
    while said:
        message, end = decoder.raw_decode(said)
        token_ids += message.get("tokens", {}).get("token_ids", [])
        said = said[end:].strip()

    with Client(served.scheduler, PATIENT) as client:
        expected = client.complete([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8))
    assert token_ids == list(expected.token_ids)


def test_documents_show_lines_of_both_programs() -> None:
    assert {line.program for line in shown_lines()} == {"grpcurl", "curl"}


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

STORY = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
JSON = ("-H", "Content-Type: application/json")


def curl(served: ServedModel, path: str, *options: str) -> str:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", *options, served.base_url + path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout


def posted(body: object, options: Sequence[str] = JSON) -> tuple[str, ...]:
    return (*options, "-d", json.dumps(body))


@needs_curl
def test_curl_gets_lines_of_events_when_streaming(served: ServedModel) -> None:
    body = {**STORY, "model": served.model, "stream": True}

    head, _, text = curl(
        served, "/v1/completions", "--no-buffer", "--include", *posted(body)
    ).partition("\n\n")

    assert "content-type: text/event-stream" in head.lower()
    assert text.endswith("data: [DONE]\n\n")
    *events, _ = text.split("\n\n")[:-1]
    fields = [event.partition("\n") for event in events]
    assert all(event_id.startswith("id: ") and "\n" not in event_id for _, _, event_id in fields)
    chunks = [json.loads(data.removeprefix("data: ")) for data, _, _ in fields]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == (
        ", a funny lamb named Ravi"
    )


@needs_curl
def test_curl_gets_the_first_event_before_the_last_token(served: ServedModel) -> None:
    body = {**STORY, "model": served.model, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    command = ["curl", "--silent", "--no-buffer", *posted(body)]
    with subprocess.Popen(
        [*command, served.base_url + "/v1/completions"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: {")
        was_running = process.poll() is None
        process.terminate()

    assert was_running
