"""The Node example streams a completion and resumes it, against a fake scheduler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve_client import Client, SamplingParams
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import Cut
from tests.support.fakes.running_schedulers import FakeServer
from tests.support.processes.patience import PATIENCE_S, PATIENT

FOLDER = Path(__file__).resolve().parents[2] / "clients" / "examples" / "node"
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def run_example(server: FakeServer) -> subprocess.CompletedProcess[str]:
    assert (FOLDER / "node_modules").exists(), "its packages are not installed: make node"
    return subprocess.run(
        ["node", "resume.mjs", server.address],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_node_example_brings_the_whole_completion_when_the_stream_breaks(
    server: FakeServer,
) -> None:
    with Client(server.address, PATIENT) as client:
        expected = client.complete([1, 2, 3], SamplingParams(seed=5, max_tokens=8)).token_ids
    server.fake.requests.clear()
    server.fake.num_tokens = 0

    def break_twice(number: int) -> None:
        if number == 3:
            raise Cut
        if number == 6:  # the third token of the second stream
            raise Cut(DomainError("DRAINING", "the scheduler shuts down"))

    server.fake.before_token = break_twice

    result = run_example(server)

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        *(f"token {token_id}" for token_id in expected),
        "FINISH_REASON_LENGTH, 8 tokens",
    ]
    resumed = [list(request.resume_token_ids) for request in server.fake.requests]
    assert resumed == [[], list(expected[:3]), list(expected[:5])]
    assert {request.sampling_params.seed for request in server.fake.requests} == {5}


def test_node_example_stops_when_the_request_is_refused(server: FakeServer) -> None:
    def refuse(number: int) -> None:
        raise Cut(DomainError("INVARIANT_BROKEN", "a fault of the server"))

    server.fake.before_token = refuse

    result = run_example(server)

    assert result.returncode == 1
    assert "13 INTERNAL" in result.stderr
    assert len(server.fake.requests) == 1
