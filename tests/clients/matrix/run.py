"""Runs the newest versions of programs of others, each in an environment of its own.

`python -m tests.clients.matrix.run [--base-url URL] [CLIENT ...]`: without a URL, the programs talk
to a server that answers as OpenAI's does, and the bodies of their requests are written to
`bodies/CLIENT.json`, which `tests/integration/test_client_bodies.py` sends to the gateway. The
model at URL has to be named `fake`, or `SPLITSERVE_TEST_MODEL`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.matrix.stand_in import stand_in
from tests.support.processes.forked import ROOT

BODIES = Path(__file__).with_name("bodies")
PACKAGES = {
    "openai": ["openai"],
    "litellm": ["litellm"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "openai_agents": ["openai-agents"],
    "llama_index": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "langchain": ["langchain-openai"],
    "smolagents": ["smolagents[openai]"],
    "haystack": ["haystack-ai"],
    "autogen": ["autogen-agentchat", "autogen-ext[openai]"],
}
# Longer texts of requests are cut: instructions of agents have many pages.
_MAX_CHARS = 400


def environment(client: str, folder: Path) -> Path:
    """The Python of a new environment that has the client."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *PACKAGES[client]], check=True)
    return python


def failures(client: str, python: Path, base_url: str) -> dict[str, str]:
    """Why calls of the client failed, by name."""
    done = subprocess.run(
        [python, "-m", f"tests.clients.matrix.{client}_calls", base_url],
        cwd=ROOT,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"all": done.stderr}
    # Some programs write to the standard output, too.
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {name: failure for name, failure in outcomes.items() if failure}


def write_bodies(client: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Writes different requests, in the order in which they came."""
    lines = [json.dumps([path, _shortened(body)], ensure_ascii=False) for path, body in requests]
    text = ",\n".join(dict.fromkeys(lines))
    (BODIES / f"{client}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _shortened(value: object) -> object:
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    return value


def main() -> int:
    """Returns the number of failed calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url")
    parser.add_argument("clients", nargs="*", default=list(PACKAGES))
    given = parser.parse_args()
    num_failed = 0
    for client in given.clients:
        with tempfile.TemporaryDirectory() as folder:
            python = environment(client, Path(folder))
            if given.base_url is not None:
                failed = failures(client, python, given.base_url)
            else:
                with stand_in() as server:
                    failed = failures(client, python, server.url)
                write_bodies(client, server.requests)
        num_failed += len(failed)
        sys.stdout.write(f"{client}: {'failed' if failed else 'passed'}\n")
        sys.stdout.writelines(f"  {name}: {failure}\n" for name, failure in failed.items())
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
