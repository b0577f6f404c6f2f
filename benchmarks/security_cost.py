"""What security costs, against plain text in the same run: the two take turns, round by round.

`step`: a step's round trip from scheduler to executor and back over mutual TLS (as `wire`, with an
executor that computes nothing), and what part of a step of `--step-ms` it adds. `gateway`: tokens
per second of many streams through two stacks of processes (as `http`), of which one has
`--scheduler-options` and `--gateway-options`, say `--api-keys FILE` and `--api-key-file FILE`, and
requests with `--api-key`; without options it says how far apart two equal stacks are measured.
Aims: at most 1 % of a step, at most 5 % of the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.http import check, letters_request, stack
from benchmarks.http_load import run_closed
from benchmarks.report import emit
from benchmarks.wire import Link, running_core
from scheduler_service.executors.executor_link import execute_method
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.cluster_identity import NOBODY, ClusterIdentity, Role
from splitserve_rpc.server import channel_options
from tests.support.security.cluster import Certificates

_NUM_WARM_UPS = 20
_KINDS = ("plain", "secured")


# -- a step --------------------------------------------------------------------------------------


@contextmanager
def _null_executor(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.null_executor", "executor", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        try:
            yield executor.stdout.readline().strip()
        finally:
            executor.terminate()


async def _time_steps(
    addresses: Sequence[str], identities: Sequence[ClusterIdentity], num_rows: int, num_steps: int
) -> list[list[float]]:
    """Microseconds of the round trips of each link; after one of the first comes the second's."""
    channels = [
        identity.channel(address, Role.EXECUTOR, channel_options())
        for address, identity in zip(addresses, identities, strict=True)
    ]
    links, cores = [], [running_core(num_rows) for _ in channels]
    for channel in channels:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        info = (await stub.GetInfo(pb.GetInfoRequest())).executor
        links.append(Link(execute_method(channel)(), info.executor_epoch))
    times_us: list[list[float]] = [[] for _ in channels]
    for _ in range(num_steps + _NUM_WARM_UPS):
        for link, core, times in zip(links, cores, times_us, strict=True):
            plan = core.schedule()
            assert plan is not None
            times.append(await link.round_trip(core, plan))
    for channel in channels:
        await channel.close()
    return [times[_NUM_WARM_UPS:] for times in times_us]


def measure_steps(num_rows: int, num_steps: int, step_ms: float) -> None:
    """Mutual TLS beside plain text."""
    with tempfile.TemporaryDirectory() as folder:
        certificates = Certificates.make(Path(folder) / "certs")
        directory = str(certificates.directory)
        with (
            _null_executor(str(num_rows)) as plain,
            _null_executor(str(num_rows), directory) as tls,
        ):
            identities = (NOBODY, certificates.identity("scheduler"))
            times_us = asyncio.run(_time_steps((plain, tls), identities, num_rows, num_steps))
    medians = {kind: statistics.median(times) for kind, times in zip(_KINDS, times_us, strict=True)}
    added_us = statistics.median(secured - plain for plain, secured in zip(*times_us, strict=True))
    emit(
        "security_step",
        rows=num_rows,
        **{f"{kind}_us": round(median, 1) for kind, median in medians.items()},
        added_us=round(added_us, 1),
        added_percent_of_step=round(added_us / (step_ms * 1e3) * 100, 2),
    )


# -- the gateway ---------------------------------------------------------------------------------


def _tokens_per_s(http: str, api_key: str, num_streams: int, num_tokens: int) -> float:
    requests = [letters_request(seed, num_tokens, http) for seed in range(num_streams)]
    if api_key:
        header = f"\r\nAuthorization: Bearer {api_key}\r\n\r\n".encode()
        requests = [request.replace(b"\r\n\r\n", header, 1) for request in requests]
    started_s = time.perf_counter()
    streams = uvloop.run(run_closed(http, requests, num_streams))
    elapsed_s = time.perf_counter() - started_s
    check(streams, num_tokens)
    return num_streams * num_tokens / elapsed_s


def measure_gateway(arguments: argparse.Namespace) -> None:
    """A stack with the given options beside one without."""
    executor = ["benchmarks.letters_executor", "{scheduler}", "0.02"]
    options = (arguments.scheduler_options.split(), arguments.gateway_options.split())
    per_s: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with stack(executor, 1024) as (plain, _), stack(executor, 1024, *options) as (secured, _):
        for _ in range(arguments.rounds):
            for kind, http, key in zip(
                _KINDS, (plain, secured), ("", arguments.api_key), strict=True
            ):
                rate = _tokens_per_s(http, key, arguments.streams, arguments.tokens)
                per_s[kind].append(rate)
    medians = {kind: statistics.median(rates) for kind, rates in per_s.items()}
    emit(
        "security_gateway",
        streams=arguments.streams,
        rounds=arguments.rounds,
        **{f"{kind}_tokens_per_s": round(median) for kind, median in medians.items()},
        lost_percent=round((1 - medians["secured"] / medians["plain"]) * 100, 1),
    )


def main() -> None:
    """Measures both and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="what a step with a model takes"
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scheduler-options", default="", help="of the secured stack")
    parser.add_argument("--gateway-options", default="", help="of the secured stack")
    parser.add_argument("--api-key", default="", help="that requests to the secured stack bring")
    arguments = parser.parse_args()
    measure_steps(arguments.rows, arguments.steps, arguments.step_ms)
    measure_gateway(arguments)


if __name__ == "__main__":
    main()
