"""Configuration of a benchmark run, checked and built from command line arguments."""

from __future__ import annotations

import argparse
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitserve_bench.figures import Slo, parse_seconds
from splitserve_bench.load import Pace
from splitserve_bench.runs import RunConfig
from splitserve_bench.targets import AskOptions, TargetAddress, parse_target
from splitserve_bench.workloads import (
    Conversation,
    Distribution,
    Limits,
    SharedPrefix,
    SyntheticLoad,
    read_trace,
)
from splitserve_common import parse_json
from splitserve_rpc import TlsFiles, check_pair

API_KEY_ENV = "SPLITSERVE_API_KEY"
_DEFAULT_CONVERSATIONS = 100
_MOST_PROCESSES = 256
_ONE_TURN = "1"


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Configuration of `splitserve bench`.

    `num_requests`: requests of a round with one target; None if unknown.
    """

    targets: tuple[TargetAddress, ...]
    asking: AskOptions
    run: RunConfig
    workload: Callable[[], Iterator[Conversation]]
    num_requests: int | None
    json_file: Path | None
    picture_file: Path | None
    shows_progress: bool | None
    num_processes: int
    # Flags as given, for the report.
    load: Mapping[str, Any]


def bench_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> BenchConfig:
    """Builds the configuration. Raises ValueError, which names the flag, and SecurityUnusable."""
    limits = _limits(arguments)
    prompt_seed = arguments.prompt_seed
    if prompt_seed is None:
        prompt_seed = secrets.randbits(32)
    pace = Pace(
        arguments.concurrency,
        arguments.max_open,
        arguments.timeout,
        arguments.duration,
        arguments.max_behind,
    )
    run = RunConfig(
        pace,
        arguments.slo or Slo(),
        arguments.warm_up,
        arguments.rounds,
        prompt_seed,
    )
    return BenchConfig(
        targets=_targets(arguments, environ),
        asking=_asking(arguments),
        run=run,
        workload=_workload(arguments, limits),
        num_requests=_num_requests(arguments, limits),
        json_file=arguments.json,
        picture_file=arguments.picture,
        shows_progress=False if arguments.quiet else None,
        num_processes=_num_processes(arguments),
        load=_given_flags(arguments, prompt_seed),
    )


def _num_processes(arguments: argparse.Namespace) -> int:
    number: int = arguments.processes
    flag, most = "--max-open", arguments.max_open
    if arguments.concurrency is not None:
        flag, most = "--concurrency", arguments.concurrency
    if number > min(most, _MOST_PROCESSES):
        reason = f"{_MOST_PROCESSES}, and no more than {flag}, which is {most}"
        raise ValueError(f"--processes is {number}; allowed: 1 to {reason}")
    return number


def _limits(arguments: argparse.Namespace) -> Limits:
    num_conversations = arguments.requests
    if num_conversations is None and arguments.duration is None and arguments.trace is None:
        num_conversations = _DEFAULT_CONVERSATIONS
    return Limits(
        num_conversations,
        arguments.duration if arguments.concurrency is None else None,
        arguments.speed,
        arguments.max_prompt_tokens,
        arguments.max_output_tokens,
    )


def _num_requests(arguments: argparse.Namespace, limits: Limits) -> int | None:
    may_be_fewer = arguments.trace is not None or arguments.duration is not None
    has_turns = arguments.turns.text != _ONE_TURN
    return None if may_be_fewer or has_turns else limits.num_conversations


def _workload(
    arguments: argparse.Namespace, limits: Limits
) -> Callable[[], Iterator[Conversation]]:
    """Returns the workload factory. Raises ValueError if flags do not define arrival times."""
    if arguments.trace is not None:
        if arguments.rate is not None:
            raise ValueError(
                "--rate is not allowed with --trace, which has its own times; use --speed"
            )
        return lambda: limits.apply(read_trace(arguments.trace))
    if (arguments.rate is None) == (arguments.concurrency is None):
        raise ValueError("give --rate (open loop), --concurrency (closed loop), or --trace")
    load = SyntheticLoad(
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.shared_prefix,
        arguments.turns,
        arguments.think_time,
        arguments.rate,
        arguments.burstiness,
    )
    return lambda: limits.apply(load.conversations(arguments.seed))


def _asking(arguments: argparse.Namespace) -> AskOptions:
    try:
        extra_body = parse_json(arguments.extra_body)
    except ValueError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra_body, dict):
        raise ValueError(f"--extra-body is {arguments.extra_body!r}; allowed: a JSON object")
    return AskOptions(
        arguments.temperature,
        not arguments.stop_at_end,
        arguments.token_range,
        arguments.endpoint,
        arguments.model,
        arguments.count_tokens,
        extra_body,
    )


def _targets(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[TargetAddress, ...]:
    """Returns the targets with their keys and TLS files. Sends a key only to the target it is for.

    Raises ValueError.
    """
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    check_pair(files.cert, files.key)
    tls = None if files == TlsFiles() else files
    targets = [replace(parse_target(text), tls=tls) for text in arguments.targets]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ValueError(f"target names are {', '.join(names)}; allowed: distinct names (NAME=URL)")
    for text in arguments.api_key_file:
        name, separator, path = text.partition("=")
        if not separator and len(targets) == 1:
            name, path = names[0], text
        if name not in names:
            raise ValueError(
                f"--api-key-file is {text!r}; allowed: NAME=FILE with the name of a target"
            )
        index = names.index(name)
        targets[index] = replace(targets[index], api_key_file=Path(path))
    if len(targets) == 1 and targets[0].api_key_file is None:
        targets[0] = replace(targets[0], api_key=environ.get(API_KEY_ENV) or None)
    return tuple(targets)


def _given_flags(arguments: argparse.Namespace, prompt_seed: int) -> dict[str, Any]:
    """Returns the flags that reproduce the load, without files of keys."""
    names = (
        "rate", "burstiness", "concurrency", "requests", "duration", "warm_up", "trace", "speed",
        "prompt_tokens", "output_tokens", "shared_prefix", "turns", "think_time", "endpoint",
        "max_prompt_tokens", "max_output_tokens", "max_open", "max_behind", "timeout", "rounds",
        "seed", "processes",
        "temperature", "stop_at_end", "token_range", "extra_body",
    )  # fmt: skip
    flags = {name: _plain(getattr(arguments, name)) for name in names}
    return {**flags, "prompt_seed": prompt_seed}


def _plain(value: object) -> object:
    match value:
        case Distribution():
            return value.text
        case SharedPrefix():
            return f"{value.num_tokens}:{value.num_groups}"
        case Path():
            return value.name
        case tuple():
            return list(value)
    return value


# -- Parsers of flag values ------------------------------------------------------------------------


def positive_seconds(text: str) -> float:
    """Parses a time above 0, in seconds."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return seconds


def new_file(text: str) -> Path:
    """Parses a path. Checks in advance, as far as possible, that a file can be written there."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; allowed: a writable file")
    return path


def positive(text: str) -> float:
    """Parses a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def at_least_0(text: str) -> float:
    """Parses a number from 0 on."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0")
    return value


def count(text: str) -> int:
    """Parses a whole number above 0."""
    value = int(text)
    if not 0 < value < 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def token_range(text: str) -> tuple[int, int]:
    """Parses `LOW:HIGH`."""
    low, _, high = text.partition(":")
    found = int(low), int(high)
    if not 0 <= found[0] < found[1] <= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; allowed: LOW:HIGH, ascending")
    return found


def stated(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps `parse` for argparse, so that its error texts are shown to the user."""

    def parse_or_report(text: str) -> Any:  # noqa: ANN401
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_report
