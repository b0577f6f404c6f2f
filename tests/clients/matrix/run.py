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
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.matrix.stand_in import stand_in
from tests.support.processes.forked import ROOT

SCRIPTS = Path(__file__).parent
BODIES = SCRIPTS / "bodies"
ENVIRONMENTS = ROOT / ".tools" / "matrix"
PACKAGES = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm", "mcp"],
    "litellm_proxy": ["litellm[proxy]"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "openai_agents": ["openai-agents"],
    "llama_index": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "langchain": ["langchain-openai"],
    "guidellm": ["guidellm"],
    "lm_eval": ["lm-eval[api]", "pydantic"],
    "smolagents": ["smolagents[openai]"],
    "haystack": ["haystack-ai"],
    "autogen": ["autogen-agentchat", "autogen-ext[openai]"],
}
# Clients in Node.
NODE_PACKAGES = {
    "vercel_ai": ["ai", "@ai-sdk/openai-compatible", "zod"],
    "promptfoo": ["promptfoo"],
    "claude_code": ["@anthropic-ai/claude-code"],
    "codex": ["@openai/codex"],
}
# They install 6 and 2 GB.
_BY_NAME_ALONE = frozenset({"guidellm", "promptfoo"})
# Longer texts of requests are cut: instructions of agents have many pages.
_MAX_CHARS = 400
_TIMEOUT_S = 300.0


def environment(client: str, *, is_upgraded: bool = False) -> Path:
    """The folder of the environment that has the client; it is made if need be."""
    folder = ENVIRONMENTS / client
    packages = PACKAGES.get(client) or NODE_PACKAGES[client]
    ready, wanted = folder / ".ready", " ".join(packages)
    if not is_upgraded and ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return folder
    if client in NODE_PACKAGES:
        folder.mkdir(parents=True, exist_ok=True)
        newest = [f"{package}@latest" for package in packages]
        install = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(folder)]
        subprocess.run([*install, *newest], check=True)
    else:
        if not (folder / "bin").exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
    ready.write_text(wanted, encoding="utf-8")
    return folder


def has_script(client: str, kind: str) -> bool:
    """Whether there is a script of the client: what it `calls`, or its `checks`."""
    return any(SCRIPTS.glob(f"{client}_{kind}.*"))


def command(client: str, kind: str, folder: Path) -> list[str]:
    """The command that runs a script in an environment; the URL comes last."""
    if client in NODE_PACKAGES:
        # A module finds the packages beside it.
        return ["node", str(shutil.copy(SCRIPTS / f"{client}_{kind}.mjs", folder / "checks.mjs"))]
    return [str(folder / "bin" / "python"), "-m", f"tests.clients.matrix.{client}_{kind}"]


def outcomes(
    command: Sequence[str], base_url: str, packages: Sequence[Path] = ()
) -> Iterator[tuple[str, str]]:
    """What a script writes: names of checks, and why they failed, empty if they did not.

    `packages`: folders that have some of its packages.
    """
    done = subprocess.run(
        [*command, base_url],
        cwd=ROOT,
        env={
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "none",
            "PROMPTFOO_CONFIG_DIR": str(ENVIRONMENTS / "promptfoo"),
            "PROMPTFOO_DISABLE_TELEMETRY": "1",
            "PROMPTFOO_DISABLE_UPDATE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *packages])),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    # Some programs write to the standard output, too.
    for line in done.stdout.splitlines():
        if line.startswith('["check", '):
            _, name, problem = json.loads(line)
            yield name, problem
    if done.returncode:
        yield "run", done.stderr


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


def check(client: str, folder: Path, base_url: str) -> list[str]:
    """Runs the checks of a client, a line for each. Returns the row of the table."""
    version, passed, failed = "?", list[str](), list[str]()
    for name, problem in outcomes(command(client, "checks", folder), base_url):
        if name == "version":
            version = problem
            continue
        sys.stdout.write(f"{client} {name}: {problem or 'passed'}\n")
        (failed if problem else passed).append(name)
    return [client, version, ", ".join(passed), ", ".join(failed)]


def record(client: str, folder: Path) -> list[str]:
    """Writes the bodies of the requests of a client. Returns a row of the table."""
    with stand_in() as server:
        found = dict(outcomes(command(client, "calls", folder), server.url))
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
    parser.add_argument("clients", nargs="*", metavar="CLIENT")
    given = parser.parse_args()
    kind = "calls" if given.record else "checks"
    known = [name for name in (*PACKAGES, *NODE_PACKAGES) if has_script(name, kind)]
    if unknown := set(given.clients).difference(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    clients = given.clients or [name for name in known if name not in _BY_NAME_ALONE]
    folders = {name: environment(name, is_upgraded=given.upgrade) for name in clients}
    if given.record:
        rows = [record(name, folder) for name, folder in folders.items()]
    elif given.base_url is not None:
        rows = [check(name, folder, given.base_url) for name, folder in folders.items()]
    else:
        with scripted_gateway() as url:
            rows = [check(name, folder, url) for name, folder in folders.items()]
    sys.stdout.write("\n| client | version | passed | failed |\n|---|---|---|---|\n")
    sys.stdout.writelines(f"| {' | '.join(row)} |\n" for row in rows)
    return int(any(failed for *_, failed in rows))


if __name__ == "__main__":
    sys.exit(main())
