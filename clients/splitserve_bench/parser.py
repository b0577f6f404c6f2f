"""Command line flags of `splitserve bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from splitserve_bench.arguments import (
    API_KEY_ENV,
    at_least_0,
    count,
    new_file,
    positive,
    positive_seconds,
    stated,
    token_range,
)
from splitserve_bench.figures import Slo, parse_seconds
from splitserve_bench.workloads import FORMS, Distribution, SharedPrefix

_DESCRIPTION = """\
Puts load on one target, or on several in turns, and reports latencies with confidence intervals. A
target is grpc://HOST:PORT (a splitserve scheduler) or http://HOST:PORT/v1 (any server with OpenAI's
API), optionally with a name: ours=grpc://localhost:50051.
"""
_EPILOG = f"""\
DIST is {FORMS}; TIME is a number with us, ms, s, m or h. `splitserve bench compare A.json B.json`
compares two reports. docs/benchmarking.md defines the figures.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of one load."""
    parser = argparse.ArgumentParser(
        prog="splitserve bench", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="[NAME=]URL")
    _add_pace(parser)
    _add_workload(parser)
    _add_access(parser)
    _add_results(parser)
    return parser


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrival of requests")
    group.add_argument(
        "--rate", type=positive, metavar="R", help="conversations per second, open loop"
    )
    group.add_argument(
        "--burstiness", type=at_least_0, default=1.0, metavar="CV",
        help="variation of the intervals: 0 even, 1 Poisson, above: bursts (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=count, metavar="N", help="conversations at a time, closed loop"
    )
    group.add_argument(
        "--requests", type=count, metavar="N",
        help="total conversations (default: 100, or all of --duration or of the trace)",
    )  # fmt: skip
    group.add_argument(
        "--duration",
        type=positive_seconds,
        metavar="TIME",
        help="start no conversation after this time",
    )
    group.add_argument(
        "--warm-up", type=stated(parse_seconds), default=0.0, metavar="TIME",
        help="exclude requests due in this time (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--speed", type=positive, default=1.0, metavar="X",
        help="replay speed: 2 halves all arrival times (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-open", type=count, default=4096, metavar="N",
        help="most conversations at a time, open loop; others are late (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--max-behind", type=positive_seconds, default=30.0, metavar="TIME",
        help="an open loop that is this late starts no more conversations (default: 30s)",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=count, default=1, metavar="N",
        help="processes that share the load, if one cannot keep up (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=positive_seconds, default=600.0, metavar="TIME",
        help="time after which an unfinished request counts as failed (default: 600s)",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=count, default=1, metavar="N",
        help="number of times that each target gets the load (default: 1)",
    )  # fmt: skip


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("content of requests")
    distribution = stated(Distribution.parse)
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded trace: Azure's CSV, or Mooncake's JSONL",
    )
    for flag, default, text in (
        ("--prompt-tokens", "512", "prompt tokens of each turn"),
        ("--output-tokens", "128", "output tokens of each answer"),
        ("--turns", "1", "turns of each conversation"),
        ("--think-time", "0", "seconds before each later turn"),
    ):
        group.add_argument(
            flag, type=distribution, default=Distribution.parse(default), metavar="DIST",
            help=f"{text} (default: {default})",
        )  # fmt: skip
    group.add_argument(
        "--shared-prefix", type=stated(SharedPrefix.parse), default=SharedPrefix(),
        metavar="TOKENS[:GROUPS]",
        help="prefix of the first turn that all conversations of a group share (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--max-prompt-tokens", type=count, metavar="N", help="cut prompts to this length"
    )
    group.add_argument(
        "--max-output-tokens", type=count, metavar="N", help="cut answers to this length"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of times and lengths (default: 0)"
    )
    group.add_argument(
        "--prompt-seed", type=int, metavar="N",
        help="seed of the prompt texts (default: random, so that no cache contains them)",
    )  # fmt: skip


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access to targets")
    group.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions",
        help="endpoint of OpenAI's API: prompts of token ids, or of words (default: completions)",
    )  # fmt: skip
    group.add_argument(
        "--model", metavar="NAME", help="default: the first model that the server lists"
    )
    group.add_argument(
        "--temperature", type=at_least_0, default=0.0, metavar="X", help="default: 0"
    )
    group.add_argument(
        "--stop-at-end", action="store_true",
        help="let the model end its answers, rather than force the requested length",
    )  # fmt: skip
    group.add_argument(
        "--token-range", type=token_range, default=(10, 1000), metavar="LOW:HIGH",
        help="token ids of prompts (default: 10:1000)",
    )  # fmt: skip
    group.add_argument(
        "--count-tokens", action="store_true",
        help="request usage in every event over HTTP (supported by vLLM and splitserve)",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="additional body fields for OpenAI's API"
    )
    group.add_argument(
        "--api-key-file", action="append", default=[], metavar="[NAME=]FILE",
        help=f"file with a target's API key; for a single target {API_KEY_ENV} may hold the key",
    )  # fmt: skip
    for flag, text in (
        ("--tls-ca", "CA certificates (PEM) used to verify targets"),
        ("--tls-cert", "client certificate (PEM)"),
        ("--tls-key", "private key of the client certificate (PEM)"),
    ):
        group.add_argument(flag, type=Path, metavar="FILE", help=text)


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--slo", type=stated(Slo.parse), metavar="METRIC=TIME,...",
        help="limits for goodput, such as ttft=200ms,itl=50ms",
    )  # fmt: skip
    group.add_argument("--json", type=new_file, metavar="FILE", help="write the report as JSON")
    group.add_argument("--picture", type=new_file, metavar="FILE", help="write the report as SVG")
    group.add_argument("--quiet", action="store_true", help="no progress line")
