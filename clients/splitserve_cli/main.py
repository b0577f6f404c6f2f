"""Command `splitserve`; each subcommand is a module of its own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType

from splitserve_cli.extras import MODULES, missing_modules

_HELP = """\
usage: splitserve COMMAND [options]

An LLM inference engine: a scheduler that decides, executors that compute.

commands:
  serve      start a scheduler and executors on this machine; Ctrl-C stops them
  generate   stream a completion from a running server
  info       show the model, the executors and their KV pools
  top        watch requests, steps and KV blocks live
  explain    show why a request waited, was preempted, moved or was refused
  doctor     find problems of this machine and of servers, with remedies
  adapters   list, load and unload LoRA adapters
  drain      drain executors, so that they can be stopped
  scheduler  run one scheduler process
  executor   run one executor process
  gateway    run one gateway process: OpenAI's HTTP API
  bench      measure a server under load: splitserve or OpenAI-compatible
  certs      create a certificate authority and certificates for mTLS
  keys       add, list and revoke API keys
  replay     replay a scheduler's journal, and compare the decisions

`splitserve COMMAND --help` shows the options of a command.
"""
# Subcommands that are modules of this package.
_COMMANDS = (
    *("serve", "generate", "info", "top", "explain", "doctor", "adapters", "drain", "certs"),
    "keys",
)
# Subcommands that are programs of other packages, which this package does not import.
_PROGRAMS = MappingProxyType(
    {
        "scheduler": "scheduler_service",
        "executor": "executor_service",
        "gateway": "splitserve_gateway",
        "bench": "splitserve_bench",
        "replay": "scheduler_service.journal",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    # Hides gRPC's messages about connections, which are no use to the user of a command.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return _run(command, arguments[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has exited. Python flushes at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(command: str, arguments: list[str]) -> int:
    if command in _PROGRAMS:
        if command in MODULES and (missing := missing_modules(command)):
            install = f"pip install 'splitserve[{command}]'"
            sys.stderr.write(f"splitserve {command}: needs {missing}: {install}\n")
            return 2
        # -P: files in the working directory must not shadow a module.
        program = [sys.executable, "-P", "-m", _PROGRAMS[command], *arguments]
        os.execv(sys.executable, program)
    if command in _COMMANDS:
        # Imports only the module of this command, as commands need different packages.
        code: int = importlib.import_module(f"splitserve_cli.{command}").main(arguments)
        return code
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    if command == "--version":
        from importlib import metadata

        sys.stdout.write(f"splitserve {metadata.version('splitserve')}\n")
        return 0
    return _refuse(command)


def _refuse(command: str) -> int:
    if not command:
        sys.stderr.write(_HELP)
        return 2
    import difflib

    known = [*_COMMANDS, *_PROGRAMS]
    match = difflib.get_close_matches(command, known, n=1)
    hint = f"did you mean {match[0]!r}?" if match else "see splitserve --help"
    sys.stderr.write(f"splitserve: unknown command {command!r}; {hint}\n")
    return 2
