"""What the gateway takes for a token, and TTFT, beside those of another commit in the same run.

python -m benchmarks.gateway_parsing --base COMMIT

A worktree of the commit and this tree each have a gateway, before one scheduler without a model
(`scripted_scheduler`). They get the same requests in turns: chats that answer with text, and with
calls of tools. A ratio is this tree's figure by that of the commit, its interval a bootstrap over
the turns with a confidence of 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.http import cpu_s, wait_until_ready
from benchmarks.http_load import Stream, encode, run_closed
from benchmarks.report import emit
from splitserve_common import claim_address

_ROOT = Path(__file__).parents[1]
_SOURCES = ("", "common", "protos", "kernels", "clients")
_CONCURRENCY = 8
_NUM_RESAMPLES = 2000
_TEXT = "The quick brown fox jumps over the lazy dogs. " * 20
_ARGUMENTS = {"path": "src/main.py", "lines": list(range(40)), "text": _TEXT[:400], "of": {"a": 1}}
_CALL = f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': _ARGUMENTS})}\n</tool_call>"
_TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
# What the model says, and what the request has besides.
_CASES: Mapping[str, tuple[str, dict[str, object]]] = {
    "text": (_TEXT, {}),
    "calls": (f"I look.\n{_CALL}\n{_CALL}", {"tools": [_TOOL]}),
}


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder that has the commit. Raises CalledProcessError if there is none."""
    git = ["git", "-C", str(_ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def scripted_scheduler() -> Iterator[str]:
    """The address of a running scheduler."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scripted_scheduler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(_ROOT),
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


@contextmanager
def gateway(tree: Path, scheduler: str) -> Iterator[tuple[str, int]]:
    """A gateway with the code in `tree`: its address and process id."""
    http = claim_address("127.0.0.1:0")
    options = ["--http", http, "--schedulers", scheduler, "--log-level", "error"]
    process = subprocess.Popen(
        [sys.executable, "-m", "splitserve_gateway", *options], env=_environment(tree), cwd=tree
    )
    try:
        wait_until_ready(http)
        yield http, process.pid
    finally:
        process.terminate()
        process.wait()


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / each) for each in _SOURCES)}


def measure(http: str, pid: int, case: str, num_requests: int) -> dict[str, float]:
    """One turn: streams at once for the CPU time of a token, one after another for the TTFT."""
    said, more = _CASES[case]
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"[[[{said}]]]"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    request = encode("/v1/chat/completions", body, http)
    before_s = cpu_s({"gateway": pid})["gateway"]
    streams = uvloop.run(run_closed(http, [request] * num_requests, _CONCURRENCY))
    used_s = cpu_s({"gateway": pid})["gateway"] - before_s
    alone = uvloop.run(run_closed(http, [request] * max(num_requests // 4, 1), 1))
    return {
        "cpu_us_per_token": 1e6 * used_s / sum(map(_num_tokens, streams)),
        "ttft_ms": 1e3 * statistics.median(stream.ttft_s for stream in alone),
    }


def _num_tokens(stream: Stream) -> int:
    assert stream.status == 200, stream.body
    return int(stream.events()[-1]["usage"]["completion_tokens"])


def ratio_with_interval(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of the ratios of turns, and its interval."""
    logs = np.log(np.asarray(ours) / np.asarray(base))
    draws = np.random.default_rng(1).integers(len(logs), size=(_NUM_RESAMPLES, len(logs)))
    low, high = np.percentile(logs[draws].mean(axis=1), [2.5, 97.5])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def main() -> None:
    """All cases, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=32, help="of each round")
    given = parser.parse_args()
    with ExitStack() as stack:
        scheduler = stack.enter_context(scripted_scheduler())
        trees = {"base": stack.enter_context(worktree(given.base)), "ours": _ROOT}
        gateways = {
            name: stack.enter_context(gateway(tree, scheduler)) for name, tree in trees.items()
        }
        for case in _CASES:
            # The first turn of each warms up.
            turns = {name: list[dict[str, float]]() for name in gateways}
            for number in range(given.rounds + 1):
                for name in list(gateways)[:: 1 if number % 2 else -1]:
                    turns[name].append(measure(*gateways[name], case, given.requests))
            for figure in turns["ours"][0]:
                ours, base = (
                    [turn[figure] for turn in turns[name][1:]] for name in ("ours", "base")
                )
                ratio, low, high = ratio_with_interval(ours, base)
                emit(
                    "gateway_parsing",
                    case=case,
                    figure=figure,
                    ours=round(statistics.median(ours), 2),
                    base=round(statistics.median(base), 2),
                    ratio=round(ratio, 3),
                    interval=[round(low, 3), round(high, 3)],
                )


if __name__ == "__main__":
    main()
