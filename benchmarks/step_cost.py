"""What a step costs each process that a token passes: CPU time, and how often its threads switch.

Requests run to their end, one after the other or several at once, over one session of a client that
is a process of its own; all of that in turns with and without fewer threads of gRPC. A thread that
waits and is woken up costs CPU time on both sides, and what it waits for comes later; such switches
are counted by the kernel, so they say the same however busy the machine is.

    python -m benchmarks.step_cost --rows 1 8
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.report import emit
from splitserve_common import GRPC_ENVIRONMENT

# gRPC's own choice beside ours.
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"fewer threads": GRPC_ENVIRONMENT, "gRPC's threads": {"GRPC_EXPERIMENTS": ""}}
)
_CLIENT = "benchmarks.step_cost_client"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process since it began."""

    cpu_ns: int
    num_switches: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """As the kernel counts it, of all threads that there are."""
        cpu_ns = num_switches = 0
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                schedule, status = (
                    (thread / "schedstat").read_text(),
                    (thread / "status").read_text(),
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            cpu_ns += int(schedule.split()[0])
            lines = status.splitlines()
            num_switches += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary"))
        return cls(cpu_ns, num_switches)


class Stack:
    """A scheduler, an executor and a client."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[str]]) -> None:
        self._processes = processes

    def ask(self, num_rows: int, num_tokens: int) -> dict[str, float]:
        """Runs so many requests of so many tokens; what a step of them cost."""
        before = {name: Usage.of(process.pid) for name, process in self._processes.items()}
        client = self._processes["client"]
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{num_rows} {num_tokens}\n")
        client.stdin.flush()
        num_steps = int(client.stdout.readline())
        cost = {}
        for name, process in self._processes.items():
            now, then = Usage.of(process.pid), before[name]
            cost[f"{name}_us"] = (now.cpu_ns - then.cpu_ns) / num_steps / 1e3
            cost[f"{name}_switches"] = (now.num_switches - then.num_switches) / num_steps
        return cost


@contextmanager
def open_stack(environ: Mapping[str, str], max_run_ahead: int, threads: int) -> Iterator[Stack]:
    """Processes that are ready to serve, started with `environ` beside our own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    quiet = ("--log-level", "error")
    listen = ("--listen", address, "--cluster-listen", address)
    ahead = ("--max-run-ahead", str(max_run_ahead))
    model = ("--model", "bundled", "--threads", str(threads), "--scheduler", address)
    commands = {
        "scheduler": ("scheduler_service", *listen, *quiet, *ahead),
        "executor": ("executor_service", *model, *quiet),
        "client": (_CLIENT, address),
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, command in commands.items()
    }
    try:
        client = processes["client"]
        assert client.stdout is not None
        assert client.stdout.readline(), "the client ends where nobody serves"
        yield Stack(processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.communicate()


def main() -> None:
    """Measures all environments in turns; prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=400, help="of each request")
    parser.add_argument("--max-run-ahead", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    with ExitStack() as exits:
        stacks = {
            name: exits.enter_context(
                open_stack(environ, arguments.max_run_ahead, arguments.threads)
            )
            for name, environ in _ENVIRONMENTS.items()
        }
        for num_rows in arguments.rows:
            costs: dict[str, list[dict[str, float]]] = {name: [] for name in stacks}
            for run in range(arguments.runs + 1):
                for name, stack in stacks.items():
                    cost = stack.ask(num_rows, arguments.tokens)
                    if run:  # the first is to warm up
                        costs[name].append(cost)
            for name, runs in costs.items():
                medians = {
                    key: round(statistics.median(c[key] for c in runs), 1) for key in runs[0]
                }
                emit("step_cost", grpc=name, rows=num_rows, **medians)


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(cost[key] for cost in runs), 1) for key in runs[0]}


if __name__ == "__main__":
    main()
