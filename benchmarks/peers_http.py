"""HTTP servers of several engines in turns, under the same load: latencies, and their ratios.

`make bench-peers ARGS="http --model DIR --peer-server NAME='COMMAND' --peer-url NAME=URL"`. In each
round each server is started anew, warmed up, measured and stopped, so only one runs at a time.
In COMMAND `{model}` is the model's directory, `{max_model_len}` its limit (raised as the longest
request needs it), and `{max_num_seqs}` how many requests run at once. Requests are token ids for
`/v1/completions`, drawn from a seed: in a round all servers get the same. The rows, for each model:

- `streams: N`: N requests run at a time, the next begins when one ends.
- `arrivals`: requests come at random times (Poisson), at the rate at which the first server, with 8
  at a time, began them; or at `--arrivals-per-s`.
- `long prompt`: comes while 8 requests decode; gaps are those of the decodes until its first token.
- `beside a long prompt`: 8 requests with prompts of 128 tokens, half a second after such a prompt.

Gaps are the times between chunks of a stream, and a chunk may have several tokens:
`tokens_per_chunk`. `cpu_ms_per_token` is CPU time of the server's processes, `foreign_cores` what
other processes than server and load used: figures of rounds where that is not near 0 are worthless.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from benchmarks.http import cpu_s, model_executor, served_model, stack
from benchmarks.http_load import Stream, encode, run_beside, run_closed, run_open
from benchmarks.report import emit, percentile

_PATH = "/v1/completions"
_URL = r"http://[^/:]+:\d+/?"
_OK = 200
# A server's messages are not to mix with the figures.
_STDERR = 2
_START_S = 600.0
_STOP_S = 30.0
_FEWEST_REQUESTS = 8
_ARRIVALS_STREAMS = 8
_NUM_DECODES = 8
_NUM_SHORT = 8
_SHORT_PROMPT = 128
# Chunks that each decode has had when the long prompt comes.
_DECODED_CHUNKS = 8
# Enough for the gaps in which its first token comes to end.
_LONG_PROMPT_OUTPUT = 16
# By then a server has read it.
_SHORT_PROMPTS_AFTER_S = 0.5
# Lower ids are those of special tokens.
_FIRST_TOKEN = 16

_T = TypeVar("_T")
Figures = dict[str, float]

_TITLES = {
    "ttft_ms_p50": "TTFT p50, ms",
    "ttft_ms_p99": "TTFT p99, ms",
    "gap_ms_p50": "gap p50, ms",
    "gap_ms_p99": "gap p99, ms",
    "gap_ms_max": "longest gap, ms",
    "tokens_per_chunk": "tokens per chunk",
    "tokens_per_s": "tokens/s",
    "cpu_ms_per_token": "CPU ms per token",
    "start_s": "start to first token, s",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `pids`: its processes by name; descendants count as theirs."""

    host: str
    model: str
    pids: dict[str, int]


StartServer = Callable[[], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Load:
    """What each server is asked. Ranges of lengths are in tokens, both ends included."""

    vocab_size: int
    streams: Sequence[int]
    requests_per_stream: int
    prompt_lengths: tuple[int, int]
    output_lengths: tuple[int, int]
    arrivals_per_s: float | None
    long_prompt: int
    decode_tokens: int

    @property
    def num_positions(self) -> int:
        """Tokens of the longest request."""
        decode = _SHORT_PROMPT + self.decode_tokens
        short = self.prompt_lengths[1] + self.output_lengths[1]
        long = max(self.long_prompt + _LONG_PROMPT_OUTPUT, decode) if self.long_prompt else 0
        return max(short, long)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: token ids of its prompt, and how many tokens are to be generated."""

    prompt: Sequence[int]
    num_tokens: int

    def encoded(self, server: Server) -> bytes:
        """The request as bytes for a server."""
        body = {"model": server.model, "prompt": self.prompt, "max_tokens": self.num_tokens}
        return encode(
            _PATH, {**body, "temperature": 0, "ignore_eos": True, "stream": True}, server.host
        )


def draw_requests(load: Load, num_requests: int, seed: str) -> list[Asked]:
    """Prompts of log-uniform length, outputs of uniform length; no two prompts begin alike."""
    rng = random.Random(seed)
    shortest, longest = map(math.log, load.prompt_lengths)
    return [
        Asked(
            _draw_prompt(rng, load, round(math.exp(rng.uniform(shortest, longest)))),
            rng.randint(*load.output_lengths),
        )
        for _ in range(num_requests)
    ]


def _draw_prompt(rng: random.Random, load: Load, length: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, load.vocab_size) for _ in range(length)]


@contextmanager
def our_server(
    model: Path, max_num_seqs: int, executor_options: Sequence[str], options: Sequence[str]
) -> Iterator[Server]:
    """Our three processes. `options`: those of the scheduler."""
    executor = model_executor(str(model), executor_options)
    with stack(executor, max_num_seqs, options) as (host, pids):
        yield Server(host, served_model(host), pids)


@contextmanager
def peer_server(command: Sequence[str], host: str) -> Iterator[Server]:
    """Starts a server of another engine in a process group of its own, and ends all of them.

    Raises RuntimeError if something else is at that address, or if the server does not start.
    """
    with suppress(OSError):
        raise RuntimeError(f"{host} is taken: a server with model {served_model(host)} answers")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=_STDERR, start_new_session=True
    )
    try:
        yield Server(host, _wait_for_model(process, host), {"server": process.pid})
    finally:
        _stop_group(process)
        assert process.stdin is not None
        process.stdin.close()


def _wait_for_model(process: subprocess.Popen[bytes], host: str) -> str:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError):
            return served_model(host)
        time.sleep(0.1)
    status = process.poll()
    ended = f"ended with status {status}" if status is not None else f"took over {_START_S:g} s"
    raise RuntimeError(f"the server for {host} {ended} before it listed a model: {process.args!r}")


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def with_positions(model: Path, num_positions: int) -> Iterator[Path]:
    """`model`, or a copy of the same name that allows so many positions; weights are linked."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= num_positions:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / model.name
        copy.mkdir()
        for file in model.resolve().iterdir():
            (copy / file.name).symlink_to(file)
        (copy / "config.json").unlink()
        changed = {**config, "max_position_embeddings": num_positions}
        (copy / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        yield copy


def measure_server(
    start: StartServer, load: Load, number: int, found: Callable[[str, Figures], None]
) -> None:
    """Starts a server and puts the load of round `number` on it; reports each row to `found`.

    Raises RuntimeError if a request is not answered in full.
    """
    begun = time.perf_counter()
    with start() as server:
        (first,) = draw_requests(load, 1, f"{number} first")
        _run(server, [replace(first, num_tokens=1)], partial(run_closed, concurrency=1))
        found("start", {"start_s": time.perf_counter() - begun})
        warm_up = draw_requests(load, _FEWEST_REQUESTS, f"{number} warm-up")
        _run(server, warm_up, partial(run_closed, concurrency=_FEWEST_REQUESTS))
        per_s = load.arrivals_per_s
        for num_streams in load.streams:
            num = max(_FEWEST_REQUESTS, load.requests_per_stream * num_streams)
            requests = draw_requests(load, num, f"{number} {num_streams}")
            figures = _run(server, requests, partial(run_closed, concurrency=num_streams))
            found(f"streams: {num_streams}", figures)
            if per_s is None and num_streams == _ARRIVALS_STREAMS:
                per_s = figures["requests_per_s"]
        if per_s is not None:
            found("arrivals", _measure_arrivals(server, load, number, per_s))
        if load.long_prompt:
            found("long prompt", _measure_long_prompt(server, load, number))
            found("beside a long prompt", _measure_short_prompts(server, load, number))


Drive = Callable[[str, list[bytes]], Coroutine[Any, Any, list[Stream]]]


def _run(server: Server, asked: Sequence[Asked], drive: Drive) -> Figures:
    requests = [each.encoded(server) for each in asked]
    streams, costs = _with_costs(server, drive(server.host, requests))
    for stream in streams:
        _check(stream)
    num_tokens = sum(each.num_tokens for each in asked)
    cpu = {
        f"cpu_ms_per_token_{name}": 1e3 * used / num_tokens for name, used in costs.cpu_s.items()
    }
    return {
        **latencies(streams),
        "tokens_per_chunk": num_tokens / sum(len(_chunk_times_s(stream)) for stream in streams),
        "tokens_per_s": num_tokens / costs.elapsed_s,
        "requests_per_s": len(asked) / costs.elapsed_s,
        "cpu_ms_per_token": 1e3 * sum(costs.cpu_s.values()) / num_tokens,
        **cpu,
        "foreign_cores": costs.foreign_cores,
    }


def _measure_arrivals(server: Server, load: Load, number: int, per_s: float) -> Figures:
    num = 2 * load.requests_per_stream * _ARRIVALS_STREAMS
    rng = random.Random(f"{number} instants")
    at_s = list(itertools.accumulate(rng.expovariate(per_s) for _ in range(num)))
    figures = _run(
        server, draw_requests(load, num, f"{number} arrivals"), partial(run_open, at_s=at_s)
    )
    return {**figures, "arrivals_per_s": per_s}


def _measure_long_prompt(server: Server, load: Load, number: int) -> Figures:
    rng = random.Random(f"{number} long prompt")
    decode = Asked((), load.decode_tokens)
    decodes = [
        replace(decode, prompt=_draw_prompt(rng, load, _SHORT_PROMPT)).encoded(server)
        for _ in range(_NUM_DECODES)
    ]
    prompt = Asked(_draw_prompt(rng, load, load.long_prompt), _LONG_PROMPT_OUTPUT).encoded(server)
    (streams, stream), costs = _with_costs(
        server, run_beside(server.host, decodes, prompt, _DECODED_CHUNKS)
    )
    _check(stream)
    begin_s, end_s = stream.sent_s, stream.times_s[0]
    gaps_ms = [
        1e3 * (after - before)
        for each in streams
        for before, after in itertools.pairwise(each.times_s)
        if after > begin_s and before < end_s
    ]
    return {
        "ttft_ms_p50": 1e3 * stream.ttft_s,
        "gap_ms_p50": percentile(gaps_ms, 50),
        "gap_ms_p99": percentile(gaps_ms, 99),
        "gap_ms_max": max(gaps_ms),
        "foreign_cores": costs.foreign_cores,
    }


def _measure_short_prompts(server: Server, load: Load, number: int) -> Figures:
    rng = random.Random(f"{number} beside a long prompt")
    lengths = [load.long_prompt, *[_SHORT_PROMPT] * _NUM_SHORT]
    requests = [
        Asked(_draw_prompt(rng, load, length), _LONG_PROMPT_OUTPUT).encoded(server)
        for length in lengths
    ]
    at_s = [0.0, *[_SHORT_PROMPTS_AFTER_S] * _NUM_SHORT]
    streams, costs = _with_costs(server, run_open(server.host, requests, at_s))
    for stream in streams:
        _check(stream)
    return {**latencies(streams[1:]), "foreign_cores": costs.foreign_cores}


def latencies(streams: Sequence[Stream]) -> Figures:
    """Percentiles of the times to the first chunk and of the gaps between chunks, in ms."""
    ttft_ms = [1e3 * stream.ttft_s for stream in streams]
    gaps_ms = [
        1e3 * (after - before)
        for stream in streams
        for before, after in itertools.pairwise(_chunk_times_s(stream))
    ]
    figures = {"ttft_ms_p50": percentile(ttft_ms, 50), "ttft_ms_p99": percentile(ttft_ms, 99)}
    if gaps_ms:
        figures |= {"gap_ms_p50": percentile(gaps_ms, 50), "gap_ms_p99": percentile(gaps_ms, 99)}
    return figures


def _chunk_times_s(stream: Stream) -> list[float]:
    """Arrivals of `stream`, but for one that only says why it ended: that is no wait for tokens."""
    last = _last_choice(stream)
    return stream.times_s if last["text"] or len(stream.times_s) == 1 else stream.times_s[:-1]


def _check(stream: Stream) -> None:
    if stream.status != _OK or _last_choice(stream)["finish_reason"] != "length":
        raise RuntimeError(f"status {stream.status}, not answered in full: {stream.body[-300:]!r}")


def _last_choice(stream: Stream) -> dict[str, Any]:
    choices = [choice for event in stream.events() for choice in event["choices"]]
    return choices[-1] if choices else {"text": "", "finish_reason": None}


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a load: its duration, CPU time of each process of the server, cores that others used."""

    elapsed_s: float
    cpu_s: Mapping[str, float]
    foreign_cores: float


def _with_costs(server: Server, load: Coroutine[Any, Any, _T]) -> tuple[_T, Costs]:
    before, busy_before_s = cpu_s(server.pids), _busy_s()
    start = time.perf_counter()
    result = uvloop.run(load)
    elapsed_s = time.perf_counter() - start
    used = {name: after - before[name] for name, after in cpu_s(server.pids).items()}
    foreign_s = _busy_s() - busy_before_s - sum(used.values())
    del used["client"]
    return result, Costs(elapsed_s, used, max(0.0, foreign_s / elapsed_s))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


@dataclass(slots=True)
class Results:
    """Figures of one model: `found[row][figure][engine]` has a value for each round."""

    model: str
    found: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, engine: str, row: str, figures: Figures) -> None:
        """Keeps the figures of a round, and prints them."""
        for name, value in figures.items():
            by_engine = self.found.setdefault(row, {}).setdefault(name, {})
            by_engine.setdefault(engine, []).append(value)
        rounded = {name: round(value, 3) for name, value in figures.items()}
        emit("peers_http", model=self.model, engine=engine, row=row, **rounded)

    def table(self, engines: Sequence[str]) -> list[str]:
        """Markdown: medians of the rounds, and of the ratios of the first engine to others."""
        first, *others = engines
        head = [f"{self.model} | ", *engines, *(f"{first} / {other}" for other in others)]
        lines = [head, ["--- | ---"] + ["--:"] * (len(head) - 1)]
        for row, figures in self.found.items():
            for name, title in _TITLES.items():
                if by_engine := figures.get(name):
                    values = [by_engine.get(engine, []) for engine in engines]
                    ratios = [_ratio(values[0], each) for each in values[1:]]
                    lines.append([f"{row} | {title}", *map(_range, values), *ratios])
        return ["| " + " | ".join(line) + " |" for line in lines]


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return f"{middle} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else middle


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=False) if b]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all servers in rounds; prints an object for each row, and a table for each model."""
    parser = _parser()
    given = parser.parse_args(arguments)
    commands, urls = _by_name(given.peer_server), _by_name(given.peer_url)
    if commands.keys() != urls.keys():
        parser.error("each --peer-server needs a --peer-url of the same name, and the reverse")
    for name, url in urls.items():
        if not re.fullmatch(_URL, url):
            parser.error(f"--peer-url {name}={url!r}: http://HOST:PORT is allowed")
    for model in given.model:
        results = Results(model.resolve().name)
        load = _load(given, model)
        with with_positions(model, load.num_positions) as directory:
            engines = _engines(given, directory, commands, urls)
            try:
                _measure_rounds(engines, given.rounds, load, results)
            finally:
                sys.stdout.write("\n".join(results.table(list(engines))) + "\n\n")


def _measure_rounds(
    engines: Mapping[str, StartServer], num_rounds: int, load: Load, results: Results
) -> None:
    for number in range(num_rounds):
        for name, start in engines.items():
            measure_server(start, load, number, partial(results.add, name))
            if rates := results.found.get("arrivals", {}).get("arrivals_per_s"):
                load = replace(load, arrivals_per_s=next(iter(rates.values()))[0])


def _load(given: argparse.Namespace, model: Path) -> Load:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return Load(
        vocab_size=config["vocab_size"],
        streams=given.streams,
        requests_per_stream=given.requests_per_stream,
        prompt_lengths=tuple(given.prompt_lengths),
        output_lengths=tuple(given.output_lengths),
        arrivals_per_s=given.arrivals_per_s,
        long_prompt=given.long_prompt,
        decode_tokens=given.decode_tokens,
    )


def _engines(
    given: argparse.Namespace, model: Path, commands: Mapping[str, str], urls: Mapping[str, str]
) -> dict[str, StartServer]:
    """All servers by name, in their order: ours with its options, its variants, the peers."""
    common = shlex.split(given.scheduler_options)
    variants = {"splitserve": "", **_by_name(given.variant)}
    max_num_seqs = max(_NUM_DECODES + 1, *given.streams)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    values = {
        "{model}": str(model),
        "{max_model_len}": str(config["max_position_embeddings"]),
        "{max_num_seqs}": str(max_num_seqs),
    }
    ours: dict[str, StartServer] = {
        name: partial(
            our_server,
            *(model, max_num_seqs, shlex.split(given.executor_options)),
            [*common, *shlex.split(options)],
        )
        for name, options in variants.items()
    }
    peers: dict[str, StartServer] = {
        name: partial(
            peer_server,
            [_filled(part, values) for part in shlex.split(command)],
            urls[name].removeprefix("http://").rstrip("/"),
        )
        for name, command in commands.items()
    }
    return ours | peers


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def _by_name(values: Sequence[str]) -> dict[str, str]:
    return dict(value.split("=", 1) for value in values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peers http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, nargs="+", required=True, metavar="DIR")
    add("--peer-server", action="append", default=[], metavar="NAME=COMMAND")
    add("--peer-url", action="append", default=[], metavar="NAME=http://HOST:PORT")
    add("--rounds", type=int, default=3)
    add("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--requests-per-stream", type=int, default=3)
    add("--prompt-lengths", type=int, nargs=2, default=[32, 512], metavar=("MIN", "MAX"))
    add("--output-lengths", type=int, nargs=2, default=[64, 128], metavar=("MIN", "MAX"))
    add("--arrivals-per-s", type=float, help="default: requests/s of the first server at 8 streams")
    add("--long-prompt", type=int, default=16384, help="tokens; 0: no such row")
    add("--decode-tokens", type=int, default=4096, help="most tokens of a decode beside it")
    add("--executor-options", default="", help="further options of our executor")
    add("--scheduler-options", default="", help="further options of our scheduler")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="our server with these options of the scheduler, too, as if it were a peer",
    )
    return parser
