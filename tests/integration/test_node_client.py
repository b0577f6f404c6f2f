"""The Node client: its own tests, its examples beside the Python client, its package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve_client import Client, SamplingParams
from tests.support.fakes.scheduler_thread import FakeServer
from tests.support.processes.patience import PATIENT

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clients" / "splitserve-node"
MODEL = ROOT / "executor_service" / "bundled_model"
# A machine with much other work takes its time.
TIMEOUT_S = 840
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def run(*command: object, cwd: Path = PACKAGE) -> str:
    """What the command prints; fails with all of it."""
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHON": sys.executable, "REPOSITORY": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: what tests build does not meet what others build at the same time."""
    assert (PACKAGE / "node_modules").exists(), "its packages are not there: make node"
    clients = tmp_path_factory.mktemp("node") / "clients"
    shutil.copytree(
        PACKAGE, clients / PACKAGE.name, ignore=shutil.ignore_patterns("node_modules", "dist")
    )
    (clients / PACKAGE.name / "node_modules").symlink_to(PACKAGE / "node_modules")
    shutil.copy(ROOT / "LICENSE", clients.parent)
    run("npm", "run", "build", cwd=clients / PACKAGE.name)
    return clients / PACKAGE.name


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_node_client_passes_its_own_tests(package: Path) -> None:
    assert "# fail 0" in run("npm", "test", cwd=package)


def test_node_examples_print_the_tokens_that_python_gets(package: Path, server: FakeServer) -> None:
    streamed = run("node", "examples/generate.mjs", server.address, cwd=package).splitlines()
    side_by_side = run("node", "examples/session.mjs", server.address, cwd=package).splitlines()

    with Client(server.address, PATIENT) as client:
        texts = [
            " ".join(map(str, client.complete([1, 2, 3], params).token_ids))
            for params in (SamplingParams(seed=seed, max_tokens=8) for seed in (5, 6, 7))
        ]
    chunks = [line.removeprefix("tokens ") for line in streamed[:-1]]
    assert (" ".join(chunks), streamed[-1]) == (texts[0], "finish length 8")
    assert side_by_side == [
        f"seed {seed}: {text}" for seed, text in zip((5, 6, 7), texts, strict=True)
    ]


@pytest.mark.parametrize("prompt", ["Once upon a time", "naïve café 🚀, über 2+2=4"])
def test_node_example_prints_the_text_that_python_decodes(
    package: Path, server: FakeServer, prompt: str
) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    server.fake.tokenizer_files = {name: (MODEL / name).read_bytes() for name in names}

    printed = run("node", "examples/text.mjs", server.address, prompt, cwd=package)

    with Client(server.address, PATIENT) as client:
        tokenizer = client.get_tokenizer()
        generation = client.complete(
            tokenizer.encode(prompt), SamplingParams(seed=5, max_tokens=16)
        )
    assert printed == tokenizer.decode(generation.token_ids)
    sent, ours = (list(request.prompt_token_ids) for request in server.fake.requests)
    assert sent == ours


def test_node_package_brings_what_users_need_and_no_more(package: Path, tmp_path: Path) -> None:
    (packed,) = json.loads(
        run("npm", "pack", "--json", "--pack-destination", tmp_path, cwd=package)
    )

    files = {file["path"] for file in packed["files"]}
    assert {"package.json", "README.md", "LICENSE", "dist/index.js", "dist/index.d.ts"} <= files
    assert {path.split("/")[0] for path in files if "/" in path} == {"dist"}
    # As somebody has it who installed it.
    modules = tmp_path / "node_modules"
    modules.mkdir()
    run("tar", "-xzf", packed["filename"], cwd=tmp_path)
    (tmp_path / "package").rename(modules / "splitserve")
    for scope in ("@grpc", "@bufbuild"):
        (modules / scope).symlink_to(PACKAGE / "node_modules" / scope)
    program = "import('splitserve').then(({ Client }) => new Client().close())"
    run("node", "-e", program, cwd=tmp_path)
