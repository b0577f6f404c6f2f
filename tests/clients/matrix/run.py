"""Runs the newest versions of programs of others, each in an environment of its own.

`python -m tests.clients.matrix.run [--record] [--upgrade] [--base-url URL] [CLIENT ...]`: checks
what the programs make of the answers of a gateway whose model says what the checks need, and
returns 1 if a check fails. With --record they talk to a server that answers as OpenAI's does, and
the bodies of their requests are written to `bodies/CLIENT.json`, which
`tests/integration/test_client_bodies.py` sends to the gateway. With --upgrade the environments get
the newest versions of today. The gateway at URL is that of `tests.clients.matrix.server`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.matrix.stand_in import stand_in
from tests.support.processes.forked import ROOT

BODIES = Path(__file__).with_name("bodies")
ENVIRONMENTS = ROOT / ".tools" / "matrix"
PACKAGES = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm", "mcp"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "openai_agents": ["openai-agents"],
    "llama_index": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "langchain": ["langchain-openai"],
    "smolagents": ["smolagents[openai]"],
    "haystack": ["haystack-ai"],
    "autogen": ["autogen-agentchat", "autogen-ext[openai]"],
}
# Longer texts of requests are cut: instructions of agents have many pages.
_MAX_CHARS = 400
_TIMEOUT_S = 300.0


def environment(client: str, *, is_upgraded: bool = False) -> Path:
    """The Python of the environment that has the client; the environment is made if need be."""
    folder = ENVIRONMENTS / client
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = " ".join(PACKAGES[client])
    if not is_upgraded and ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--upgrade", *PACKAGES[client]], check=True)
    ready.write_text(wanted, encoding="utf-8")
    return python


def script(client: str, kind: str) -> Path:
    """The script of the client: what it `calls`, or its `checks`."""
    return Path(__file__).with_name(f"{client}_{kind}.py")


def outcomes(script: Path, python: Path, base_url: str) -> Iterator[tuple[str, str]]:
    """What a script writes: names of checks, and why they failed, empty if they did not."""
    done = subprocess.run(
        [python, "-m", f"tests.clients.matrix.{script.stem}", base_url],
        cwd=ROOT,
        env={
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "none",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        yield "all", done.stderr
        return
    # Some programs write to the standard output, too.
    for line in done.stdout.splitlines():
        if line.startswith('["check", '):
            _, name, problem = json.loads(line)
            yield name, problem


@contextmanager
def scripted_gateway() -> Iterator[str]:
    """URL of a running gateway whose model says what it is asked to say."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.clients.matrix.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate()


def check(client: str, python: Path, base_url: str) -> list[str]:
    """Runs the checks of a client, a line for each. Returns the row of the table."""
    version, passed, failed = "?", [], []
    for name, problem in outcomes(script(client, "checks"), python, base_url):
        if name == "version":
            version = problem
            continue
        sys.stdout.write(f"{client} {name}: {problem or 'passed'}\n")
        (failed if problem else passed).append(name)
    return [client, version, ", ".join(passed), ", ".join(failed)]


def record(client: str, python: Path) -> list[str]:
    """Writes the bodies of the requests of a client. Returns a row of the table."""
    with stand_in() as server:
        found = dict(outcomes(script(client, "calls"), python, server.url))
    _write_bodies(client, server.requests)
    for name, problem in found.items():
        sys.stdout.write(f"{client} {name}: {problem or 'recorded'}\n")
    return [client, "", "", ", ".join(name for name, problem in found.items() if problem)]


def _write_bodies(client: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
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
    """Returns 1 if a check or a call failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--base-url")
    parser.add_argument("clients", nargs="*", choices=[*PACKAGES, []])
    given = parser.parse_args()
    kind = "calls" if given.record else "checks"
    clients = given.clients or [each for each in PACKAGES if script(each, kind).exists()]
    pythons = {each: environment(each, is_upgraded=given.upgrade) for each in clients}
    if given.record:
        rows = [record(each, python) for each, python in pythons.items()]
    elif given.base_url is not None:
        rows = [check(each, python, given.base_url) for each, python in pythons.items()]
    else:
        with scripted_gateway() as url:
            rows = [check(each, python, url) for each, python in pythons.items()]
    sys.stdout.write("\n| client | version | passed | failed |\n|---|---|---|---|\n")
    sys.stdout.writelines(f"| {' | '.join(row)} |\n" for row in rows)
    return int(any(failed for *_, failed in rows))


if __name__ == "__main__":
    sys.exit(main())
