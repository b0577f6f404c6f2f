"""Command `splitserve adapters`: lists, loads and unloads the LoRA adapters of a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from splitserve_cli.command_line import add_operators_server, aligned, ask, operators_config, run
from splitserve_client import Adapter, AsyncClient
from splitserve_common import printable

_NUM_DIGITS = 12


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="splitserve adapters",
        description="Lists, loads and unloads the LoRA adapters of a server.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list the adapters that requests may name")
    listing.add_argument("--json", action="store_true", help="one JSON object")
    load = commands.add_parser("load", help="register an adapter")
    load.add_argument("name", metavar="NAME", help="name for requests")
    load.add_argument(
        "path", metavar="PATH", help="PEFT folder or GGUF file, on the scheduler's machine"
    )
    load.add_argument(
        "--replace", action="store_true", help="replace an adapter of this name from another folder"
    )
    unload = commands.add_parser("unload", help="remove an adapter; requests that run keep it")
    unload.add_argument("name", metavar="NAME")
    for each in (listing, load, unload):
        add_operators_server(each)
    arguments = parser.parse_args(argv)
    command = {"list": _list, "load": _load, "unload": _unload}[arguments.command]
    return run("adapters", lambda: command(arguments))


async def _list(arguments: argparse.Namespace) -> int:
    async with AsyncClient(arguments.address, operators_config(arguments)) as client:
        adapters = await client.list_adapters()
    if arguments.json:
        text = json.dumps({"adapters": list(map(asdict, adapters))})
    elif adapters:
        text = "\n".join(_table(adapters))
    else:
        text = "no adapters"
    sys.stdout.write(f"{text}\n")
    return 0


def _table(adapters: Sequence[Adapter]) -> list[str]:
    """Returns the headings and a line for each adapter."""
    rows = [
        (
            each.name,
            each.digest[:_NUM_DIGITS] or "not read",
            each.base_model or "unknown",
            each.path,
        )
        for each in adapters
    ]
    headings = ("ADAPTER", "DIGEST", "TRAINED FOR", "PATH")
    columns = [
        aligned(list(map(printable, column)), "<") for column in zip(headings, *rows, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


async def _load(arguments: argparse.Namespace) -> int:
    adapter = await ask(
        arguments,
        operators_config(arguments),
        lambda operators: operators.load_adapter(
            arguments.name, arguments.path, replace=arguments.replace
        ),
    )
    text = printable(f"{adapter.name} is loaded from {adapter.path}")
    sys.stdout.write(f"{text}\n")
    return 0


async def _unload(arguments: argparse.Namespace) -> int:
    await ask(
        arguments,
        operators_config(arguments),
        lambda operators: operators.unload_adapter(arguments.name),
    )
    sys.stdout.write(f"{printable(arguments.name)} is removed\n")
    return 0
