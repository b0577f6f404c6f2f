"""Processes are started with an environment that gRPC understands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from splitserve_rpc.grpc_threads import ENVIRONMENT, with_fewer_threads

ROOT = Path(__file__).parents[3]
# What is said of an environment is said when a channel or a server is made.
_SERVER = """
import asyncio, grpc.aio

async def serve():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
"""


def _complaints(environ: dict[str, str]) -> str:
    command = [sys.executable, "-c", _SERVER]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stderr


def test_grpc_knows_the_names_in_the_environment() -> None:
    assert "Unknown experiment" in _complaints({**os.environ, "GRPC_EXPERIMENTS": "-not_one"})
    assert "Unknown experiment" not in _complaints({**os.environ, **ENVIRONMENT})


def test_with_fewer_threads_leaves_what_was_told() -> None:
    told = {"GRPC_EXPERIMENTS": "", "PATH": "/bin"}

    assert with_fewer_threads(told) == told
    assert with_fewer_threads({"PATH": "/bin"}) == {**ENVIRONMENT, "PATH": "/bin"}


def test_images_have_the_same_environment() -> None:
    base = (ROOT / "Dockerfile").read_text().partition(" AS runtime\n")[2].partition("\nFROM ")[0]

    assert all(f"{name}={value}" in base for name, value in ENVIRONMENT.items())
