"""Engines that serve a model, and how texts are asked of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.more_tokens.texts import Text
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import AsyncClient, Finish, SamplingParams, SchedulingParams
from splitserve_options import options_of

_START_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 300.0
_NUM_SLOTS = 8
# What llama.cpp is started with, by name. Its own defaults (the last 12 tokens are looked for, 48
# are guessed) are for longer repetitions than those of these texts.
LLAMA_VARIANTS: dict[str, tuple[str, ...]] = {
    "llama.cpp": (),
    "llama.cpp, lookup": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", "16"),
    ),
}


@dataclass(slots=True)
class Arrivals:
    """When tokens of a text arrived, in seconds since it was asked for, and which."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, time_s: float, token_ids: Sequence[int]) -> None:
        """Some tokens have come together."""
        self.times_s += [time_s] * len(token_ids)
        self.token_ids += token_ids


class Engine(Protocol):
    """One that runs."""

    @property
    def process_ids(self) -> Sequence[int]:
        """Of what serves; their children count, too."""
        ...

    def ask(self, texts: Sequence[Text]) -> list[Arrivals]:
        """All at once, each to its length."""
        ...


@dataclass(frozen=True, slots=True)
class Splitserve:
    """Scheduler and executor, through gRPC. `runner`: one for all of them, as gRPC wants it."""

    address: str
    process_ids: Sequence[int]
    runner: asyncio.Runner

    def ask(self, texts: Sequence[Text]) -> list[Arrivals]:
        return self.runner.run(self._ask(texts))

    async def _ask(self, texts: Sequence[Text]) -> list[Arrivals]:
        scheduling = SchedulingParams(bypass_prefix_cache=True)
        async with AsyncClient(self.address) as client, client.session() as session:

            async def ask(text: Text) -> Arrivals:
                num_tokens = len(text.output)
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
                arrivals, started_s = Arrivals(), time.perf_counter()
                async for event in session.submit(text.prompt, params, scheduling=scheduling):
                    if not isinstance(event, Finish):
                        arrivals.add(time.perf_counter() - started_s, event.token_ids)
                return arrivals

            return await asyncio.gather(*(ask(text) for text in texts))


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's own server, through HTTP."""

    port: int
    process_ids: Sequence[int]

    def ask(self, texts: Sequence[Text]) -> list[Arrivals]:
        with ThreadPoolExecutor(len(texts)) as threads:
            return list(threads.map(self._ask, texts))

    def _ask(self, text: Text) -> Arrivals:
        body = {
            "prompt": text.prompt,
            "n_predict": len(text.output),
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_TIMEOUT_S)
        arrivals, started_s = Arrivals(), time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"llama-server says {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                arrivals.add(time.perf_counter() - started_s, event.get("tokens", ()))
        connection.close()
        return arrivals


@contextmanager
def splitserve(
    model: Path, threads: int, scheduler_options: Sequence[str], runner: asyncio.Runner
) -> Iterator[Engine]:
    """Started for `model`."""
    before = set(psutil.Process().children())
    with serving(str(model), threads, scheduler_options=scheduler_options) as address:
        processes = set(psutil.Process().children()) - before
        runner.run(wait_until_connected(address))
        yield Splitserve(address, [process.pid for process in processes], runner)


@contextmanager
def llama_server(program: Path, model: Path, threads: int, more: Sequence[str]) -> Iterator[Engine]:
    """llama.cpp's server, started for `model`, a GGUF file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(threads), "--parallel", str(_NUM_SLOTS), "--no-ui"),
        *("--ctx-size", str(_NUM_SLOTS * 2048), "--cache-ram", "0", *more),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_healthy(port, process)
        yield LlamaServer(port, [process.pid])
    finally:
        process.terminate()
        process.wait()


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"llama-server did not start within {_START_TIMEOUT_S:g} s")


def splitserve_variants() -> dict[str, tuple[str, ...]]:
    """The options of the scheduler that are compared, by name; those that it has."""
    known = {option.name for option in options_of("scheduler")}
    runs_on = ("--max-run-ahead", "8")
    variants: dict[str, tuple[str, ...]] = {
        "splitserve, one a step": ("--max-run-ahead", "1"),
        "splitserve, running on": runs_on,
    }
    if "speculation" in known:
        variants["splitserve, lookup"] = (*runs_on, "--speculation", "prompt-lookup")
    return variants
