"""`curl` sees an event stream line by line, and while it comes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from tests.clients.stack import ServedModel
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

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


def test_curl_gets_lines_of_events_when_it_asks_for_a_stream(served: ServedModel) -> None:
    body = {**STORY, "model": served.model, "stream": True}

    head, _, text = curl(
        served, "/v1/completions", "--no-buffer", "--include", *posted(body)
    ).partition("\n\n")

    assert "content-type: text/event-stream" in head.lower()
    assert text.endswith("data: [DONE]\n\n")
    *events, _ = text.split("\n\n")[:-1]
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == (
        ", a funny lamb named Ravi"
    )


def test_curl_has_the_first_event_before_the_last_token_is_computed(served: ServedModel) -> None:
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


def test_curl_may_leave_out_the_model(served: ServedModel) -> None:
    answer = json.loads(curl(served, "/v1/completions", *posted(STORY)))

    assert answer["choices"][0]["text"] == ", a funny lamb named Ravi"


def test_curl_is_told_when_it_does_not_say_that_a_body_is_json(served: ServedModel) -> None:
    """What a page in a browser could send to another server without asking it first."""
    options = ("--write-out", "\n%{http_code}", *posted(STORY, options=()))

    body, _, status = curl(served, "/v1/completions", *options).rpartition("\n")

    assert status == "415"
    assert "application/json" in json.loads(body)["error"]["message"]


def test_curl_fails_with_the_reason_when_a_request_is_refused(served: ServedModel) -> None:
    answer = curl(
        served,
        "/v1/completions",
        *("--write-out", "\n%{http_code} %{content_type}"),
        *posted({**STORY, "temperature": -1}),
    )

    body, _, status = answer.rpartition("\n")
    assert status.split()[0] == "400"
    assert status.split()[1].startswith("application/json")
    assert json.loads(body)["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/models", "/openapi.json"])
def test_curl_finds_a_page(served: ServedModel, path: str) -> None:
    assert curl(served, path, "--fail") != "" or path.startswith("/health")
