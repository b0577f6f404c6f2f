"""splitserve against other engines: the same model, the same requests, through the real services.

Given are a model and requests, which a peer's benchmark can use, too: a JSON file {workload:
[{"prompt": [token ids], "out": number of tokens}]}. All requests of a workload are submitted at
once, those of `b1` one at a time; `warmup` is not measured. What a peer measured is read from its
result file and becomes part of the table: JSON with "startup_to_first_token_s", "peak_rss_MiB", and
"runs", each with "workload", "out_tok_s" and "tpot_p50" (seconds). With `--peer-command` all of
them take turns, each started anew: whatever else the machine does then concerns all. Prints one
JSON object for each run of ours and each workload, then the table.

With `http` as first argument: latencies of HTTP servers (`peers_http`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import peers_http
from benchmarks.report import emit, print_table
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import AsyncClient, Finish, SamplingParams

ONE_AT_A_TIME = "b1"
WARM_UP = "warmup"
_SAMPLE_S = 0.1


@dataclass(slots=True)
class Figures:
    """What was measured of one engine; lists have one entry for each run."""

    start_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    ms_per_token: dict[str, list[float]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process's children, and of theirs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stop_event = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        """Samples until `stop`."""
        own = psutil.Process()
        while not self._stop_event.wait(_SAMPLE_S):
            total = 0
            for process in own.children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> float:
        """Ends the thread; returns the peak in MiB."""
        self._stop_event.set()
        self.join()
        return self.peak_bytes / 2**20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since submission of the first and the last token of a request, and their number."""

    first_s: float
    last_s: float
    num_tokens: int


async def run_requests(address: str, requests: Sequence[dict[str, Any]]) -> list[Timing]:
    """Submits all at once; returns when all have ended."""
    async with AsyncClient(address) as client, client.session() as session:
        started = time.perf_counter()

        async def run(request: dict[str, Any]) -> Timing:
            params = SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True)
            times, num_tokens = [], 0
            async for event in session.submit(request["prompt"], params):
                if isinstance(event, Finish):
                    num_tokens = event.usage.num_output_tokens
                else:
                    times.append(time.perf_counter() - started)
            return Timing(times[0], times[-1], num_tokens)

        return await asyncio.gather(*(run(request) for request in requests))


def measure(
    model: str,
    threads: int,
    workloads: dict[str, Any],
    runs: Sequence[int],
    figures: Figures,
    loop: asyncio.Runner,
) -> None:
    """Starts the services, and runs each workload once for each of `runs`, numbers of runs.

    `loop`: one for all of a process, as gRPC wants it.
    """
    memory = PeakMemory()
    memory.start()
    started = time.perf_counter()
    warm_up = workloads[WARM_UP]
    with serving(model, threads) as address:
        loop.run(wait_until_connected(address))
        loop.run(run_requests(address, [{**warm_up[0], "out": 1}]))
        figures.start_s.append(time.perf_counter() - started)
        loop.run(run_requests(address, warm_up))
        for name in [name for name in workloads if name != WARM_UP]:
            for run in runs:
                _measure_run(address, name, _fresh(workloads[name], run), figures, loop)
    figures.peak_mib.append(memory.stop())


def _measure_run(
    address: str,
    name: str,
    requests: list[dict[str, Any]],
    figures: Figures,
    loop: asyncio.Runner,
) -> None:
    batches = [[request] for request in requests] if name == ONE_AT_A_TIME else [requests]
    wall_s, timings = 0.0, []
    for batch in batches:
        started = time.perf_counter()
        timings += loop.run(run_requests(address, batch))
        wall_s += time.perf_counter() - started
    per_token = [(t.last_s - t.first_s) / (t.num_tokens - 1) for t in timings if t.num_tokens > 1]
    num_tokens = sum(timing.num_tokens for timing in timings)
    figures.tokens_per_s.setdefault(name, []).append(num_tokens / wall_s)
    figures.ms_per_token.setdefault(name, []).append(1e3 * statistics.median(per_token))
    first = [1e3 * timing.first_s for timing in timings]
    figures.ttft_ms.setdefault(name, []).append(statistics.median(first))
    rate, ms = figures.tokens_per_s[name][-1], figures.ms_per_token[name][-1]
    emit("peers_run", workload=name, tokens_per_s=round(rate, 1), ms_per_token=round(ms, 2))


def _fresh(requests: list[dict[str, Any]], run: int) -> list[dict[str, Any]]:
    """The same requests with other tokens, so that no run finds the prompts of one before.

    Tokens are exchanged one for one: what prompts have in common they keep.
    """
    return [
        {**request, "prompt": [_other_token(token, run) for token in request["prompt"]]}
        for request in requests
    ]


def _other_token(token: int, run: int) -> int:
    """Tokens up to 8191 are moved among themselves, the others stay."""
    return (token + 977 * run) % 8192 if token < 8192 else token


def read_peer(path: Path, figures: Figures) -> None:
    """A peer's result file; runs that were disturbed are left out if enough others are there."""
    result = json.loads(path.read_text(encoding="utf-8"))
    figures.start_s.append(result["startup_to_first_token_s"])
    figures.peak_mib.append(result["peak_rss_MiB"])
    for name in dict.fromkeys(run["workload"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["workload"] == name]
        clean = [run for run in runs if run.get("clean", True)]
        for run in clean if len(clean) >= 2 else runs:
            figures.tokens_per_s.setdefault(name, []).append(run["out_tok_s"])
            figures.ms_per_token.setdefault(name, []).append(1e3 * run["tpot_p50"])


def print_engines(engines: dict[str, Figures]) -> None:
    """Medians, and in brackets the smallest and the largest."""
    names = list(dict.fromkeys(name for each in engines.values() for name in each.tokens_per_s))
    lines = [["", *engines]]
    for name in names:
        lines.append(
            [f"{name}, tokens/s", *(_range(e.tokens_per_s, name) for e in engines.values())]
        )
        lines.append(
            [f"{name}, ms/token", *(_range(e.ms_per_token, name) for e in engines.values())]
        )
    starts = (f"{statistics.median(each.start_s):.1f}" for each in engines.values())
    lines.append(["start to first token, s", *starts])
    peaks = (f"{statistics.median(each.peak_mib):.0f}" for each in engines.values())
    lines.append(["peak memory, MiB", *peaks])
    print_table(lines)


def _range(values: dict[str, list[float]], name: str) -> str:
    of_name = values.get(name)
    if not of_name:
        return "-"
    return f"{statistics.median(of_name):.1f} ({min(of_name):.1f} to {max(of_name):.1f})"


def main() -> None:
    """Measures, and prints beside what peers measured."""
    if sys.argv[1:2] == ["http"]:
        peers_http.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--workloads", type=Path, required=True, help="JSON file of requests")
    parser.add_argument("--only", nargs="*", help="these workloads")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=RESULT_FILE")
    parser.add_argument(
        "--peer-command",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="writes the result file of that peer, each workload once; run in each round",
    )
    arguments = parser.parse_args()
    workloads = json.loads(arguments.workloads.read_text(encoding="utf-8"))
    if arguments.only:
        workloads = {name: workloads[name] for name in (WARM_UP, *arguments.only)}
    peers = _by_name(arguments.peer)
    commands = {name: shlex.split(each) for name, each in _by_name(arguments.peer_command).items()}
    if not commands.keys() <= peers.keys():
        parser.error("each --peer-command needs a --peer of the same name, its result file")
    figures = Figures()
    engines = {"splitserve": figures} | {name: Figures() for name in peers}
    runs = range(arguments.runs)
    with asyncio.Runner() as loop:
        for numbers in ([run] for run in runs) if commands else [runs]:
            measure(arguments.model, arguments.threads, workloads, numbers, figures, loop)
            for name, command in commands.items():
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                read_peer(Path(peers[name]), engines[name])
    for name in peers.keys() - commands.keys():
        read_peer(Path(peers[name]), engines[name])
    for name, rates in figures.tokens_per_s.items():
        emit(
            "peers",
            workload=name,
            tokens_per_s=round(statistics.median(rates), 1),
            ms_per_token=round(statistics.median(figures.ms_per_token[name]), 2),
            ttft_ms=round(statistics.median(figures.ttft_ms[name]), 1),
            start_s=round(statistics.median(figures.start_s), 1),
            peak_mib=round(statistics.median(figures.peak_mib)),
            runs=arguments.runs,
            threads=arguments.threads,
        )
    print_engines(engines)


def _by_name(values: Sequence[str]) -> dict[str, str]:
    return dict(value.split("=", 1) for value in values)


if __name__ == "__main__":
    main()
