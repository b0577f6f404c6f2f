"""`splitserve bench` beside GuideLLM, an independent load generator, under the same load.

`python -m tests.clients.bench_check`: measures a server of known timings (`paced_server`) and a
scheduler and a gateway with both, prints the figures, and returns 1 if they differ.

A figure differs if the confidence interval of `splitserve bench` does not have the figure of the
other, or does not overlap with its interval where it reports one. A figure for which
`splitserve bench` has no interval is not compared.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.http import stack
from benchmarks.letters_executor import MODEL as LETTERS
from splitserve_bench.command import main as bench
from tests.clients.stack import BUNDLED
from tests.support.bench import paced_server
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S

GUIDELLM = ROOT / ".tools" / "guidellm"
NUM_REQUESTS = 64
NUM_PROMPT_TOKENS = 32
NUM_OUTPUT_TOKENS = 16
_QUANTILES = ("p50", "p90")
# Of this stack with an executor that computes nothing: what a step takes, and tokens it knows.
_STEP_S = 0.02
_LETTERS = "--token-range=1:26"
# Where steps are all alike, intervals are narrower than what a generator takes for an event.
_RESOLUTION = 0.1
_MOST_OPEN = "most open"
_RATES = ("requests_per_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Load:
    """The same load in the words of both generators.

    `num_open`: requests at a time of a closed loop. `num_served`: how many requests the server of
    known timings answers at a time.
    """

    endpoint: str
    flags: tuple[str, ...]
    profile: str
    num_served: int
    num_open: int | None = None


LOADS: Mapping[str, Load] = {
    "closed": Load(
        "completions",
        ("--concurrency=8", "--count-tokens"),
        "kind=concurrent,streams=8",
        num_served=64,
        num_open=8,
    ),
    # More than the server can do: requests wait for others.
    "open": Load("chat", ("--rate=12", "--burstiness=0"), "kind=constant,rate=12", num_served=6),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its interval: seconds, or a rate per second. Without one, it is its bounds."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Figure:
        """Returns a figure without an interval."""
        return cls(value, value, value)

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


Figures = Mapping[str, Figure]


def differences(ours: Figures, others: Figures) -> list[str]:
    """Returns a line for each figure of `others` whose interval does not overlap with ours."""
    return [
        f"{name}: {ours[name]}, but the other has {other}"
        for name, other in others.items()
        if name in ours and (other.high < ours[name].low or ours[name].high < other.low)
    ]


# -- splitserve bench ------------------------------------------------------------------------------


def bench_figures(load: Load, base_url: str, *flags: str) -> Figures:
    """Runs `splitserve bench`, in this process. Raises AssertionError if a request failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = (
            *("--quiet", *load.flags, *flags),
            f"--endpoint={load.endpoint}",
            f"--requests={NUM_REQUESTS}",
            f"--prompt-tokens={NUM_PROMPT_TOKENS}",
            f"--output-tokens={NUM_OUTPUT_TOKENS}",
            f"--timeout={PATIENCE_S}s",
            f"--json={report}",
        )
        with redirect_stdout(io.StringIO()):
            code = bench([f"{base_url}/v1", *flags])
        assert code == 0, "splitserve bench failed"
        (target,) = json.loads(report.read_text(encoding="utf-8"))["targets"]
    assert target["requests"]["num_completed"] == NUM_REQUESTS, target["errors"]
    found = target["latency_s"]
    latencies = {"itl mean": found["itl"]["mean"]} | {
        f"{metric} {name}": found[metric][name]
        for metric in ("ttft", "tpot", "e2e")
        for name in ("mean", *_QUANTILES)
    }
    figures = {name: Figure(**each) for name, each in latencies.items() if each["low"] is not None}
    if load.num_open is not None:
        figures[_MOST_OPEN] = Figure.exact(load.num_open)
    # A report has no intervals of rates. In a closed loop they follow from the mean latency.
    latency = figures["e2e mean"]
    for name in _RATES:
        rate = target["rates"][name]
        low, high = latency.value / latency.high, latency.value / latency.low
        figures[name] = Figure(rate, rate * low, rate * high)
    return figures


# -- GuideLLM --------------------------------------------------------------------------------------


def guidellm_figures(load: Load, base_url: str, model: str) -> Figures:
    """Runs GuideLLM. Raises AssertionError if it failed, or a request did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        path = "/v1/chat/completions" if load.endpoint == "chat" else f"/v1/{load.endpoint}"
        target = f"target={base_url},model={model},request_format={path}"
        lengths = f"prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_OUTPUT_TOKENS}"
        options = {
            "backend": f"kind=openai_http,{target}",
            "profile": load.profile,
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "data": f"kind=synthetic_text,{lengths}",
            "tokenizer": f"kind=huggingface_auto,model={BUNDLED}",
            "output": f"kind=json,path={report}",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        done = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", "--disable-console", *arguments],
            env={**os.environ, "PYTHONPATH": str(GUIDELLM), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics, requests = result["metrics"], result["requests"]["successful"]
    totals = metrics["request_totals"]
    assert totals["errored"] == totals["incomplete"] == 0, totals
    # Its report now and then lacks a request, and gives no reason.
    assert len(requests) >= NUM_REQUESTS - 1, totals
    # Its own rates count from the start of its scheduler.
    began_s = min(each["request_start_time"] for each in requests)
    seconds = max(each["request_end_time"] for each in requests) - began_s
    num_tokens = sum(each["output_tokens"] for each in requests)
    figures = {
        "requests_per_s": Figure.exact(len(requests) / seconds),
        "output_tokens_per_s": Figure.exact(num_tokens / seconds),
    }
    # It has a time between tokens for each request, which counts once for each token: answers of
    # one length make it the time per token.
    for name, theirs, unit_s in (
        ("ttft", "time_to_first_token_ms", 1e-3),
        ("tpot", "inter_token_latency_ms", 1e-3),
        ("e2e", "request_latency", 1.0),
    ):
        summary = metrics[theirs]["successful"]
        intervals = summary["percentile_cis"] or {}
        figures[f"{name} mean"] = _figure(summary["mean"], summary["mean_ci"], unit_s)
        for quantile in _QUANTILES:
            value = summary["percentiles"][quantile]
            figures[f"{name} {quantile}"] = _figure(value, intervals.get(quantile), unit_s)
    figures["itl mean"] = figures["tpot mean"]
    return figures


def _figure(value: float, interval: Mapping[str, float] | None, unit_s: float) -> Figure:
    bounds = interval or {"lower": value, "upper": value}
    return Figure(value * unit_s, bounds["lower"] * unit_s, bounds["upper"] * unit_s)


# -- Server of known timings -----------------------------------------------------------------------


@contextmanager
def paced(num_served: int) -> Iterator[str]:
    """Base URL of a running `paced_server`."""
    with subprocess.Popen(
        [sys.executable, "-m", paced_server.__name__, f"--num-served={num_served}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate()


def recorded_figures(base_url: str) -> Figures:
    """Returns the figures of the requests since the last call, as the server saw them."""
    with urllib.request.urlopen(f"{base_url}/record", timeout=PATIENCE_S) as response:
        record: list[dict[str, Any]] = json.load(response)
    num_tokens = [sum(each["num_tokens"]) for each in record]
    spreads_s = [each["arrivals_s"][-1] - each["arrivals_s"][0] for each in record]
    values = {
        "ttft": [each["arrivals_s"][0] - each["arrived_s"] for each in record],
        "tpot": [
            spread_s / (number - 1) for spread_s, number in zip(spreads_s, num_tokens, strict=True)
        ],
        "e2e": [each["ended_s"] - each["arrived_s"] for each in record],
    }
    found = {"itl mean": sum(spreads_s) / (sum(num_tokens) - len(record))}
    for name, each in values.items():
        deciles = statistics.quantiles(each, n=10)
        found[f"{name} mean"] = statistics.fmean(each)
        found[f"{name} p50"], found[f"{name} p90"] = deciles[4], deciles[8]
    seconds = max(each["ended_s"] for each in record) - min(each["arrived_s"] for each in record)
    changes = [(each["arrived_s"], 1) for each in record]
    changes += [(each["ended_s"], -1) for each in record]
    found[_MOST_OPEN] = max(accumulate(change for _, change in sorted(changes)))
    found["requests_per_s"] = len(record) / seconds
    found["output_tokens_per_s"] = sum(num_tokens) / seconds
    return {name: Figure.exact(value) for name, value in found.items()}


# -- Everything, as a command ----------------------------------------------------------------------


def main() -> int:
    """Returns 1 if a figure differs, else 0."""
    found = list[str]()
    for name, load in LOADS.items():
        with paced(load.num_served) as url:
            ours, truth = bench_figures(load, url), recorded_figures(url)
            theirs = guidellm_figures(load, url, paced_server.MODEL)
            theirs = {_MOST_OPEN: recorded_figures(url)[_MOST_OPEN], **theirs}
        found += _compare(f"known timings, {name}", ours, {"server": truth, "guidellm": theirs})
    executor = ["benchmarks.letters_executor", "{scheduler}", str(_STEP_S)]
    with stack(executor, 64) as (address, _):
        load, url = LOADS["closed"], f"http://{address}"
        first = bench_figures(load, url, _LETTERS)
        theirs = guidellm_figures(load, url, LETTERS)
        # Before and after, so that a drift of the machine widens the interval.
        ours = _hull(first, bench_figures(load, url, _LETTERS))
    found += _compare("this stack, closed", ours, {"guidellm": theirs})
    sys.stdout.writelines(f"{line}\n" for line in found or ["no figure differs"])
    return int(bool(found))


def _hull(first: Figures, second: Figures) -> Figures:
    """Returns intervals that have both, and what the generators themselves take."""
    return {
        name: Figure(
            (one.value + second[name].value) / 2,
            min(one.low, second[name].low) * (1 - _RESOLUTION),
            max(one.high, second[name].high) * (1 + _RESOLUTION),
        )
        for name, one in first.items()
        if name in second
    }


def _compare(title: str, ours: Figures, others: Mapping[str, Figures]) -> Sequence[str]:
    """Prints a table. Returns what differs."""
    sys.stdout.write(f"\n| {title} | splitserve bench | {' | '.join(others)} |\n")
    sys.stdout.write("|---" * (2 + len(others)) + "|\n")
    for name, figure in ours.items():
        cells = [f"{other[name].value:.4g}" if name in other else "" for other in others.values()]
        sys.stdout.write(f"| {name} | {figure} | {' | '.join(cells)} |\n")
    sys.stdout.write("\n")
    return [
        f"{title}, {generator}: {line}"
        for generator, figures in others.items()
        for line in differences(ours, figures)
    ]


if __name__ == "__main__":
    sys.exit(main())
