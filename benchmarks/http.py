"""HTTP end to end: many streams at once, tokens per second, and what TTFT the way adds.

Without a model: an executor that gives out letters (`letters_executor`), a scheduler and a gateway,
each a process; every text is compared with what it must be. `--model` or `--base-url`: completions
at several concurrencies, also of another engine's server. `cpu_s` says what part is whose.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import uvloop

from benchmarks.http_load import Stream, encode, run_closed, run_open
from benchmarks.letters_executor import MODEL, letters
from benchmarks.report import emit
from splitserve_common import claim_address

_START_S = 120.0
_PATH = "/v1/completions"


@contextmanager
def stack(
    executor: Sequence[str],
    max_num_seqs: int,
    scheduler_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
) -> Iterator[tuple[str, dict[str, int]]]:
    """A scheduler, an executor and a gateway; yields the address and the process ids.

    `tls`: how the gateway is spoken to, if its options are about HTTPS.
    """
    scheduler, http = claim_address("127.0.0.1:0"), claim_address("127.0.0.1:0")
    limits = ["--max-num-seqs", str(max_num_seqs), "--max-num-waiting", "4096"]
    quiet = ["--log-level", "error"]
    listen = ["--listen", scheduler, "--cluster-listen", scheduler]
    commands = {
        "scheduler": ["scheduler_service", *listen, *limits, *quiet, *scheduler_options],
        "executor": [part.format(scheduler=scheduler) for part in executor],
        "gateway": [
            "splitserve_gateway",
            *("--http", http, "--schedulers", scheduler),
            *quiet,
            *gateway_options,
        ],
    }
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    processes = {
        name: subprocess.Popen([sys.executable, "-m", *command], env=environment)
        for name, command in commands.items()
    }
    try:
        wait_until_ready(http, tls)
        yield http, {name: process.pid for name, process in processes.items()}
    finally:
        for process in reversed(processes.values()):
            process.terminate()
            process.wait()


def model_executor(model: str, options: Sequence[str] = ()) -> list[str]:
    """Command of an executor with a model, for `stack`."""
    return [
        *("executor_service", "--scheduler", "{scheduler}", "--listen", "127.0.0.1:0"),
        *("--model", model, "--log-level", "error", *options),
    ]


def served_model(host: str) -> str:
    """Name of the model that an OpenAI server has. Raises OSError if none answers."""
    with urllib.request.urlopen(f"http://{host}/v1/models", timeout=5) as response:
        return str(json.load(response)["data"][0]["id"])


def wait_until_ready(http: str, tls: ssl.SSLContext | None = None) -> None:
    """Waits until a gateway serves. Raises TimeoutError."""
    url = f"{'http' if tls is None else 'https'}://{http}/health/ready"
    end = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5, context=tls).close()
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError("the gateway is not ready") from error
            time.sleep(0.05)
        else:
            return


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """Seconds of a core that each process has used with its descendants, and this one alone."""
    used = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        family = (process, *process.children(recursive=True))
        used[name] = sum(map(_own_cpu_s, family))
    return {**used, "client": _own_cpu_s(psutil.Process())}


def _own_cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def peak_rss_mib(pid: int) -> int:
    """The most memory a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def letters_request(seed: int, num_tokens: int, host: str) -> bytes:
    """A streamed completion of which `letters` knows the text."""
    body = {"model": MODEL, "prompt": "abc", "seed": seed, "max_tokens": num_tokens}
    return encode(_PATH, {**body, "temperature": 1.0, "stream": True}, host)


def check(streams: Sequence[Stream], num_tokens: int) -> None:
    """Raises AssertionError if one was lost, or has the text of another."""
    for seed, stream in enumerate(streams):
        assert stream.status == 200, stream.body
        assert stream.text() == letters(seed, num_tokens), f"stream {seed}"


def measure_streams(http: str, pids: dict[str, int], num_streams: int, num_tokens: int) -> None:
    """So many streams at once."""
    requests = [letters_request(seed, num_tokens, http) for seed in range(num_streams)]
    before = cpu_s(pids)
    start = time.perf_counter()
    streams = uvloop.run(run_closed(http, requests, num_streams))
    elapsed_s = time.perf_counter() - start
    used = {name: round(after - before[name], 2) for name, after in cpu_s(pids).items()}
    check(streams, num_tokens)
    num_all = num_streams * num_tokens
    emit(
        "http_streams",
        streams=num_streams,
        tokens_per_s=round(num_all / elapsed_s),
        cpu_s=used,
        gateway_us_per_token=round(1e6 * used["gateway"] / num_all, 1),
        events=sum(len(stream.events()) for stream in streams),
        peak_rss_mib=peak_rss_mib(pids["gateway"]),
    )


def measure_first_token(http: str, pids: dict[str, int], per_s: float, seconds: float) -> None:
    """Short requests that come whether or not the last ones are done."""
    num_requests = int(per_s * seconds)
    requests = [letters_request(seed, 8, http) for seed in range(num_requests)]
    before = cpu_s(pids)
    streams = uvloop.run(run_open(http, requests, [index / per_s for index in range(num_requests)]))
    used = {name: round(after - before[name], 2) for name, after in cpu_s(pids).items()}
    check(streams, 8)
    ttft_ms = [1e3 * stream.ttft_s for stream in streams]
    emit(
        "http_first_token",
        requests_per_s=per_s,
        ttft_ms_p50=_percentile(ttft_ms, 50),
        ttft_ms_p99=_percentile(ttft_ms, 99),
        cpu_s=used,
    )


def measure_server(base: str, concurrency: int, num_tokens: int, prompt_words: int) -> None:
    """Completions of whatever model a server has."""
    host = base.removeprefix("http://").rstrip("/")
    model = served_model(host)
    rng = random.Random(concurrency)
    bodies = [
        {
            "model": model,
            "prompt": " ".join(rng.choice(_WORDS) for _ in range(prompt_words)),
            **{"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True},
        }
        for _ in range(3 * concurrency + 1)
    ]
    requests = [encode(_PATH, body, host) for body in bodies]
    uvloop.run(run_closed(host, requests[:1], 1))
    start = time.perf_counter()
    streams = uvloop.run(run_closed(host, requests[1:], concurrency))
    elapsed_s = time.perf_counter() - start
    assert all(stream.status == 200 for stream in streams), streams[0].body
    emit(
        "http_server",
        concurrency=concurrency,
        tokens_per_s=round(len(streams) * num_tokens / elapsed_s, 1),
        ttft_ms_p50=_percentile([1e3 * stream.ttft_s for stream in streams], 50),
        itl_ms_p50=_percentile([1e3 * gap for stream in streams for gap in stream.gaps_s], 50),
    )


_WORDS = ("time", "people", "water", "light", "house", "story", "number", "river", "music")


def _percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 2) if values else 0.0


def main() -> None:
    """All of it without a model; or a model, or a server, at several concurrencies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.02, help="a step with many rows")
    parser.add_argument("--per-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--model", help="folder of a model: starts everything with it")
    parser.add_argument("--base-url", help="a server that is there")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-words", type=int, default=48)
    parser.add_argument("--options", default="", help="further options of the executor")
    arguments = parser.parse_args()
    if arguments.base_url:
        for concurrency in arguments.concurrency:
            measure_server(
                arguments.base_url, concurrency, arguments.tokens, arguments.prompt_words
            )
        return
    letters_executor = ["benchmarks.letters_executor", "{scheduler}"]
    if arguments.model:
        executor = model_executor(arguments.model, arguments.options.split())
        with stack(executor, 64) as (http, _):
            for concurrency in arguments.concurrency:
                measure_server(http, concurrency, arguments.tokens, arguments.prompt_words)
        return
    with stack([*letters_executor, str(arguments.step_s)], 1024) as (http, pids):
        measure_streams(http, pids, arguments.streams, arguments.tokens)
    with stack([*letters_executor, "0"], 1024) as (http, pids):
        measure_first_token(http, pids, arguments.per_s, arguments.seconds)


if __name__ == "__main__":
    main()
