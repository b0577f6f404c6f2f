"""Runs the lines of "Five minutes" in docs/security.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.stranger.process import poll
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT, SOURCE_ROOTS
from tests.support.processes.patience import PATIENCE_S

DOCUMENT = (ROOT / "docs" / "security.md").read_text()
SECTION = DOCUMENT.partition("## Five minutes")[2].partition("\n## ")[0]
SETUP, USE = (
    [line for line in re.split(r"(?<!\\)\n", block) if line]
    for block in re.findall(r"^```\n(.*?)^```", SECTION, re.M | re.S)
)
ENVIRONMENT = {
    **{name: text for name, text in os.environ.items() if not name.startswith("SPLITSERVE_")},
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in SOURCE_ROOTS),
}
PROGRAM = shlex.join([sys.executable, "-m", "splitserve_cli"])


def command(line: str) -> list[str]:
    program, *arguments = shlex.split(line.replace("\\\n", " "))
    assert program == "splitserve"
    return [*shlex.split(PROGRAM), *arguments]


def others_may_read(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077]


def run(line: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = ENVIRONMENT | variables
    return subprocess.run(line, env=environment, cwd=folder, capture_output=True, check=False)


@contextmanager
def serving(line: str, folder: Path) -> Iterator[None]:
    small = ["--listen", reserve_address(), "--no-demo", "--num-device-blocks=128", "--threads=1"]
    process = subprocess.Popen(
        [*command(line), *small], env=ENVIRONMENT, cwd=folder, stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def test_what_is_installed_has_what_the_five_minutes_need() -> None:
    (extras,) = re.findall(r"^pip install '\.\[([\w,]+)\]'$", SETUP[0], re.M)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {"executor": "torch", "gateway": "fastapi", "security": "cryptography"}
    assert set(extras.split(",")) == set(needed)
    assert [extra for extra, name in needed.items() if name not in str(known.get(extra))] == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_five_minutes_are_as_they_are_shown(tmp_path: Path) -> None:
    _, *prepare, serve = SETUP
    script = "\n".join(["set -e", f'splitserve() {{ {PROGRAM} "$@"; }}', "umask 022", *prepare])
    done = await asyncio.to_thread(run, ["bash", "-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert others_may_read(tmp_path) == []
    http = reserve_address()
    use = "\n".join(USE).replace("api.example.org:8443", http)

    async def answer_to(key: str) -> Any:  # noqa: ANN401
        answer = await asyncio.to_thread(run, ["bash", "-c", use], tmp_path, KEY=key)
        return json.loads(answer.stdout or "{}")

    async def lists_models() -> tuple[bool, object]:
        answer = await answer_to(said.decode())
        return [model["id"] for model in answer.get("data", ())] == ["bundled"], answer

    with serving(serve.replace("8443", http.rpartition(":")[2]), tmp_path):
        await poll(lists_models, PATIENCE_S)
        stranger = await answer_to("sk-ss-000000000000-" + "A" * 43)
    assert stranger["error"]["code"] == "invalid_api_key"
