"""The checks of `make clients` for the clients that are quickly installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.bench_check import GUIDELLM
from tests.clients.matrix.run import outcomes, scripted_gateway
from tests.support.processes.forked import ROOT

# What Makefile installs beside .venv, and in an environment of its own.
AGENTS, CLIENTS = ROOT / ".tools" / "agents", ROOT / ".tools" / "clients"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_gateway() as url:
        yield url


def check(
    client: str, url: str, python: str = sys.executable, packages: Sequence[Path] = ()
) -> None:
    """Raises AssertionError if a check of the client fails."""
    found = dict(outcomes([python, "-m", f"tests.clients.matrix.{client}_checks"], url, packages))
    assert found.pop("version")
    assert found
    assert not {name: problem for name, problem in found.items() if problem}


@pytest.mark.parametrize("client", ["openai", "anthropic", "langchain"])
def test_client_of_the_environment_passes_its_checks(client: str, url: str) -> None:
    check(client, url)


@pytest.mark.thorough("five to ten seconds each; the official clients stay")
@pytest.mark.skipif(
    not (AGENTS / ".ready").exists(), reason="they are not installed: make .tools/agents/.ready"
)
@pytest.mark.parametrize("client", ["pydantic_ai", "openai_agents"])
def test_client_beside_the_environment_passes_its_checks(client: str, url: str) -> None:
    check(client, url, packages=[AGENTS])


@pytest.mark.thorough("five to ten seconds each; the official clients stay")
@pytest.mark.skipif(
    not (CLIENTS / ".ready").exists(), reason="it is not installed: make .tools/clients/.ready"
)
def test_litellm_passes_its_checks(url: str) -> None:
    check("litellm", url, str(CLIENTS / "bin" / "python"))


@pytest.mark.thorough("GuideLLM takes 15 s of CPU to start; the official clients stay")
@pytest.mark.skipif(
    not (GUIDELLM / ".ready").exists(), reason="it is not installed: make .tools/guidellm/.ready"
)
def test_guidellm_passes_its_checks(url: str) -> None:
    check("guidellm", url, packages=[GUIDELLM])
