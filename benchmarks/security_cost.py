"""What security costs, against plain text in the same run: the two take turns, round by round.

`step`: a step's round trip from scheduler to executor and back over mutual TLS (as `wire`, with an
executor that computes nothing), and what part of a step of `--step-ms` it adds. `gateway`: tokens
per second of many streams through two stacks of processes (as `http`), of which one has mutual TLS
between its processes, HTTPS, and callers with API keys; and the time of processors that the three
processes of each take for a token, since this machine's are shared with who asks and decrypts.
Connections are made before: callers keep them.
`--equal`: two stacks without all that, which says how far apart they are measured anyway. Aims: at
most 1 % of a step, at most 5 % of the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.http import check, cpu_s, letters_request, stack
from benchmarks.http_load import run_closed
from benchmarks.report import emit
from benchmarks.wire import Link, running_core
from scheduler_service.executors import execute_method
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_common import claim_address
from splitserve_rpc import NOBODY, ClusterIdentity, Role, channel_options
from tests.support.security.cluster import Certificates
from tests.support.security.credentials import KeyFile

_NUM_WARM_UPS = 20
_KINDS = ("plain", "secured")
_NUM_ROWS, _STEP_S = 1024, "0.02"


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


@dataclass(frozen=True, slots=True)
class _Stack:
    """Where its gateway is, its processes, and what requests bring along."""

    http: str
    pids: dict[str, int]
    api_key: str = ""
    tls: ssl.SSLContext | None = None

    def run(self, num_streams: int, num_tokens: int) -> tuple[float, float]:
        """Tokens per second, and microseconds of processors for each."""
        requests = [letters_request(seed, num_tokens, self.http) for seed in range(num_streams)]
        if self.api_key:
            header = f"\r\nauthorization: Bearer {self.api_key}\r\n\r\n".encode()
            requests = [request.replace(b"\r\n\r\n", header, 1) for request in requests]
        began: list[tuple[float, float]] = []
        streams = uvloop.run(
            run_closed(
                *(self.http, requests, num_streams, self.tls),
                connected=lambda: began.append((time.perf_counter(), self._cpu_s())),
            )
        )
        ((began_s, before_s),) = began
        elapsed_s, used_s = time.perf_counter() - began_s, self._cpu_s() - before_s
        check(streams, num_tokens)
        num_all = num_streams * num_tokens
        return num_all / elapsed_s, 1e6 * used_s / num_all

    def _cpu_s(self) -> float:
        used = cpu_s(self.pids)
        return sum(used[name] for name in self.pids)


@contextmanager
def _plain_stack() -> Iterator[_Stack]:
    executor = ["benchmarks.letters_executor", "{scheduler}", _STEP_S]
    with stack(executor, _NUM_ROWS) as (http, pids):
        yield _Stack(http, pids)


@contextmanager
def _secured_stack(folder: Path) -> Iterator[_Stack]:
    certificates, keys = Certificates.make(folder / "certs"), KeyFile(folder)
    (folder / "own").write_text(keys.add("t", "--scope=gateway"))
    caller = keys.add("t")
    cluster, files = claim_address("127.0.0.1:0"), certificates.files("gateway")
    ca = certificates.directory / "ca.crt"
    tls = ssl.create_default_context(cafile=str(ca))
    executor = ["benchmarks.letters_executor", cluster, _STEP_S, str(certificates.directory)]
    scheduler_options = [
        *(f"--cluster-listen={cluster}", f"--api-keys={keys.path}"),
        *certificates.flags("scheduler"),
    ]
    gateway_options = [
        *(f"--http-tls-cert={files.cert}", f"--http-tls-key={files.key}"),
        *(f"--tls-ca={ca}", f"--gateway-key-file={folder / 'own'}"),
    ]
    with stack(executor, _NUM_ROWS, scheduler_options, gateway_options, tls) as (http, pids):
        yield _Stack(http, pids, caller, tls)


def measure_gateway(arguments: argparse.Namespace) -> None:
    """A stack with everything beside one without."""
    ran: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stacks:
        plain = stacks.enter_context(_plain_stack())
        other = _plain_stack() if arguments.equal else _secured_stack(Path(folder))
        secured = stacks.enter_context(other)
        for _ in range(arguments.rounds):
            for kind, one in zip(_KINDS, (plain, secured), strict=True):
                ran[kind].append(one.run(arguments.streams, arguments.tokens))
    per_s, cpu_us = (
        {kind: statistics.median(run[place] for run in runs) for kind, runs in ran.items()}
        for place in range(2)
    )
    emit(
        "security_gateway",
        streams=arguments.streams,
        rounds=arguments.rounds,
        equal=arguments.equal,
        **{f"{kind}_tokens_per_s": round(median) for kind, median in per_s.items()},
        lost_percent=round((1 - per_s["secured"] / per_s["plain"]) * 100, 1),
        **{f"{kind}_us_per_token": round(median, 1) for kind, median in cpu_us.items()},
        more_cpu_percent=round((cpu_us["secured"] / cpu_us["plain"] - 1) * 100, 1),
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
    parser.add_argument("--equal", action="store_true", help="two stacks without security")
    arguments = parser.parse_args()
    measure_steps(arguments.rows, arguments.steps, arguments.step_ms)
    measure_gateway(arguments)


if __name__ == "__main__":
    main()
