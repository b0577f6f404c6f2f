"""`splitserve explain`: why a request waited, was preempted, moved or refused."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from splitserve.scheduler.v1 import admin_pb2
from splitserve_cli.command_line import run
from splitserve_cli.explain_text import describe_explanation, describe_queue
from splitserve_cli.operators import add_operators_server, ask, operators_config
from splitserve_client.explanations import Explanation, decode_explanation

_EPILOG = """\
exit code: 0 something is known of it; 1 nothing is, or nobody can be asked. A journal knows nothing
of requests that were refused, nor of what happened before its file begins.
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve explain",
        description="Says what happened to a request, and what it waits for.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="its id; or the id of an answer of the gateway, or the x-request-id of one; or six or"
        " more characters that it begins with, if only one does",
    )
    parser.add_argument("--next", action="store_true", help="why the first in the queue wait")
    parser.add_argument("--journal", metavar="FILE", type=Path, help="ask a journal, no scheduler")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_operators_server(parser)
    arguments = parser.parse_args(argv)
    if (arguments.request is None) != arguments.next:
        parser.error("give a REQUEST, or --next")
    if arguments.next and arguments.journal is not None:
        parser.error("--next is for a running scheduler: in a journal nobody waits any more")
    if arguments.journal is not None:
        return _explain_journal(arguments)
    return run("explain", lambda: _explain_live(arguments))


async def _explain_live(arguments: argparse.Namespace) -> int:
    config = operators_config(arguments)
    if arguments.next:
        queue = await ask(arguments, config, lambda operators: operators.explain_queue())
        sys.stdout.write(
            json.dumps(asdict(queue)) + "\n" if arguments.json else describe_queue(queue)
        )
        return 0
    explanation = await ask(
        arguments, config, lambda operators: operators.explain(arguments.request)
    )
    return _show(arguments, explanation)


def _explain_journal(arguments: argparse.Namespace) -> int:
    """The scheduler's own program decides again what the file says; this one does not import it."""
    program = [sys.executable, "-P", "-m", "scheduler_service.watching.explain_journal"]
    command = [*program, str(arguments.journal), arguments.request]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if answer.returncode:
        return answer.returncode
    return _show(arguments, decode_explanation(admin_pb2.ExplainResponse.FromString(answer.stdout)))


def _show(arguments: argparse.Namespace, explanation: Explanation) -> int:
    sys.stdout.write(
        json.dumps(asdict(explanation)) + "\n"
        if arguments.json
        else describe_explanation(
            arguments.request, explanation, is_of_journal=arguments.journal is not None
        )
    )
    return 0 if explanation.lives else 1
