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
from splitserve_bench.figures.recorder import Slo, parse_seconds
from splitserve_bench.workloads.conversation import FORMS, Distribution, SharedPrefix

_DESCRIPTION = """\
Puts load on one target, or on several in turns, and says how long answers took and how sure that
is. A target is grpc://HOST:PORT (a scheduler of ours) or http://HOST:PORT/v1 (whatever speaks
OpenAI's API), with a name before it if you like: ours=grpc://localhost:50051.
"""
_EPILOG = f"""\
DIST is {FORMS}; TIME is a number with us, ms, s, m or h. `splitserve bench compare A.json B.json`
compares two reports. docs/benchmarking.md says what each figure is.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of one load."""
    parser = argparse.ArgumentParser(
        prog="splitserve bench", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="[NAME=]URL")
    _add_pace(parser)
    _add_workload(parser)
    _add_asking(parser)
    _add_results(parser)
    return parser


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when requests are sent")
    group.add_argument(
        "--rate", type=positive, metavar="R", help="conversations per second, open loop"
    )
    group.add_argument(
        "--burstiness", type=at_least_0, default=1.0, metavar="CV",
        help="of the times between them: 0 even, 1 Poisson, above: bursts (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=count, metavar="N", help="so many at a time instead, closed loop"
    )
    group.add_argument(
        "--requests", type=count, metavar="N",
        help="conversations in all (default: 100, or what --duration or a trace has)",
    )  # fmt: skip
    group.add_argument(
        "--duration", type=positive_seconds, metavar="TIME", help="begin none after that"
    )
    group.add_argument(
        "--warm-up", type=stated(parse_seconds), default=0.0, metavar="TIME",
        help="requests that are due before are not counted (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--speed", type=positive, default=1.0, metavar="X",
        help="2: what is to come in a second comes in half of one (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-open", type=count, default=4096, metavar="N",
        help="conversations at a time in an open loop; who waits for that is late (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--max-behind", type=positive_seconds, default=30.0, metavar="TIME",
        help="an open loop that is so late begins nothing more, and says so (default: 30s)",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=count, default=1, metavar="N",
        help="so many share the load, where one cannot keep up (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=positive_seconds, default=600.0, metavar="TIME",
        help="a request without an end after that has failed (default: 600s)",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=count, default=1, metavar="N",
        help="times that the load is put on each target (default: 1)",
    )  # fmt: skip


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked")
    distribution = stated(Distribution.parse)
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="a recording: Azure's CSV, or Mooncake's JSONL"
    )
    for flag, default, text in (
        ("--prompt-tokens", "512", "of each turn"),
        ("--output-tokens", "128", "of each answer"),
        ("--turns", "1", "of each conversation"),
        ("--think-time", "0", "seconds before each later turn"),
    ):
        group.add_argument(
            flag, type=distribution, default=Distribution.parse(default), metavar="DIST",
            help=f"{text} (default: {default})",
        )  # fmt: skip
    group.add_argument(
        "--shared-prefix", type=stated(SharedPrefix.parse), default=SharedPrefix(),
        metavar="TOKENS[:GROUPS]",
        help="before the first turn, a text that all of a group have (default: 0)",
    )  # fmt: skip
    group.add_argument("--max-prompt-tokens", type=count, metavar="N", help="cut to that")
    group.add_argument("--max-output-tokens", type=count, metavar="N", help="cut to that")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of times and lengths (default: 0)"
    )
    group.add_argument(
        "--prompt-seed", type=int, metavar="N",
        help="of the texts of prompts (default: drawn, so that no cache knows them from before)",
    )  # fmt: skip


def _add_asking(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how targets are asked")
    group.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions",
        help="of OpenAI's API: with token ids, or with words (default: completions)",
    )  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    group.add_argument(
        "--temperature", type=at_least_0, default=0.0, metavar="X", help="default: 0"
    )
    group.add_argument(
        "--stop-at-end", action="store_true",
        help="answers end where the model ends them, not when they are as long as wanted",
    )  # fmt: skip
    group.add_argument(
        "--token-range", type=token_range, default=(10, 1000), metavar="LOW:HIGH",
        help="prompts are of these ids (default: 10:1000)",
    )  # fmt: skip
    group.add_argument(
        "--count-tokens", action="store_true",
        help="over HTTP, have usage in every event (vLLM and splitserve know that)",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="more fields of a body for OpenAI's API"
    )
    group.add_argument(
        "--api-key-file", action="append", default=[], metavar="[NAME=]FILE",
        help=f"a target's key; of a single target it may be in {API_KEY_ENV}",
    )  # fmt: skip
    for flag, text in (
        ("--tls-ca", "certificates of whom targets are believed, PEM"),
        ("--tls-cert", "our own certificate, PEM"),
        ("--tls-key", "private key of that, PEM"),
    ):
        group.add_argument(flag, type=Path, metavar="FILE", help=text)


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is made of it")
    group.add_argument(
        "--slo", type=stated(Slo.parse), metavar="METRIC=TIME,...",
        help="goodput is of requests within it, say ttft=200ms,itl=50ms",
    )  # fmt: skip
    group.add_argument("--json", type=new_file, metavar="FILE", help="the report")
    group.add_argument("--picture", type=new_file, metavar="FILE", help="the report as SVG")
    group.add_argument("--quiet", action="store_true", help="no line that says how far it is")
