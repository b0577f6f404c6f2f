"""Time from the start of `splitserve serve` until it is ready, on a machine that has installed."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time

from benchmarks.report import emit, percentile

READY = "ready"


def start_once() -> float:
    """Seconds from the start of the process until it says that it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "splitserve_cli", "serve", "--no-demo",
        "--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0",
    ]  # fmt: skip
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serve:
        assert serve.stdout is not None
        for line in serve.stdout:
            if READY in line:
                break
        else:
            raise RuntimeError("serve ended before it was ready")
        elapsed_s = time.perf_counter() - start
        serve.send_signal(signal.SIGINT)
        serve.stdout.read()
    return elapsed_s


def main() -> None:
    """Starts a few times and prints the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    times = [start_once() for _ in range(parser.parse_args().runs)]
    emit("startup", median_s=percentile(times, 50), max_s=percentile(times, 100), runs=len(times))


if __name__ == "__main__":
    main()
