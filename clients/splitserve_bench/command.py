"""Command `splitserve bench`: runs a load, or compares reports."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from splitserve_bench.arguments import BenchConfig, bench_config
from splitserve_bench.figures import seconds_text
from splitserve_bench.load import LoadAbandoned, LocalLoad, ProcessLoad
from splitserve_bench.parser import build_parser
from splitserve_bench.reports import (
    ReportUnreadable,
    TargetReport,
    comparison_text,
    read_report,
    report_of,
    text_of,
    write_picture,
    write_report,
)
from splitserve_bench.runs import PROBLEMS, Load, problem_text, run_load
from splitserve_bench.targets import open_target
from splitserve_client import ProgressLine
from splitserve_common import printable
from splitserve_rpc import SecurityUnusable

# Exit code of shells after Ctrl-C. The report is written nevertheless.
_STOPPED = 130
_UNINFORMATIVE = {"burstiness": 1.0, "speed": 1.0, "shared_prefix": "0:1", "turns": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code: 1 without a report or without an answered request.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "compare":
        return _compare(argv[1:])
    parser = build_parser()
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = bench_config(arguments, os.environ)
    except (ValueError, SecurityUnusable) as error:
        parser.error(printable(str(error)))
    return_code = 1
    try:
        return_code = _bench(config, argv)
    except* PROBLEMS as errors:
        sys.stderr.write(f"splitserve bench: {printable(problem_text(errors))}\n")
    except* KeyboardInterrupt:
        return_code = _STOPPED
    return return_code


def _bench(config: BenchConfig, argv: Sequence[str]) -> int:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    reports, was_stopped = asyncio.run(_measure(config, argv))
    for report in reports:
        sys.stdout.write(text_of(report) + "\n")
    for before, after in pairwise(reports):
        sys.stdout.write(comparison_text(before, after) + "\n")
    if config.json_file is not None:
        write_report(config.json_file, {"started": started, **config.load}, reports)
    if config.picture_file is not None:
        write_picture(config.picture_file, _title(config), reports)
    if was_stopped:
        return _STOPPED
    return int(any(report.content["requests"]["num_completed"] == 0 for report in reports))


async def _measure(config: BenchConfig, argv: Sequence[str]) -> tuple[list[TargetReport], bool]:
    """Runs the load until its end or Ctrl-C. Returns the reports, and whether Ctrl-C ended it."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def stop_softly() -> None:
        # A second Ctrl-C ends the process at once.
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, stop_softly)
    num_targets = len(config.targets)
    num_runs = num_targets * config.run.num_rounds
    total = None if config.num_requests is None else config.num_requests * num_runs
    with ProgressLine(total, show=config.shows_progress, clock=time.monotonic) as line:
        load = _load(config, argv)

        def warn(given_up: LoadAbandoned) -> None:
            behind = seconds_text(given_up.behind_s)
            line.say(f"splitserve bench: the load is {behind} late: no more requests are sent")

        measured = await run_load(load, num_targets, config.run, line.add, stop, warn)
    reports = [
        report_of(address.name, address.url, model, recorder)
        for address, (model, recorder) in zip(config.targets, measured, strict=True)
    ]
    return reports, stop.is_set()


def _load(config: BenchConfig, argv: Sequence[str]) -> Load:
    """Returns the load of the configuration. Raises TargetRefused, SplitserveError, OSError."""
    if config.num_processes > 1:
        # All processes use the same prompt texts.
        seed = f"--prompt-seed={config.run.prompt_seed}"
        return ProcessLoad([*argv, seed], config.num_processes)
    targets = [(address.name, open_target(address, config.asking)) for address in config.targets]
    return LocalLoad(targets, config.workload, config.run.pace)


def _title(config: BenchConfig) -> str:
    """Returns the load's flags as a title, without uninformative defaults."""
    names = (
        *("rate", "burstiness", "concurrency", "trace", "speed"),
        *("prompt_tokens", "output_tokens", "shared_prefix", "turns"),
    )
    load = {name: config.load[name] for name in names}
    flags = [
        f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in load.items()
        if value is not None and value != _UNINFORMATIVE.get(name)
    ]
    return f"splitserve bench: {', '.join(flags)}"


def _compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="splitserve bench compare",
        description="Compares each target of the reports with the first.",
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    arguments = parser.parse_args(argv)
    try:
        targets = [target for path in arguments.reports for target in read_report(path)]
    except (OSError, ReportUnreadable) as error:
        sys.stderr.write(f"splitserve bench: {printable(str(error))}\n")
        return 1
    if len(targets) < 2:
        parser.error("the reports have one target; allowed: two or more")
    for other in targets[1:]:
        sys.stdout.write(comparison_text(targets[0], other) + "\n")
    return 0
