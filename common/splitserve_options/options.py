"""Table of all options of all processes, and their parser: flags, environment and one TOML file.

A flag overrides the environment, which overrides the file, which overrides the default. To add an
option, add an entry to a tuple here or in a module named `*_table`. The flag, environment variable,
key of the file, help and the row in docs/options.md follow from the entry: `tools/list_options.py`
lists the options in the documents.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from splitserve_common import check_schedulers, is_address
from splitserve_options.adapters_table import ADAPTERS_OPTIONS
from splitserve_options.executor_table import EXECUTOR_OPTIONS
from splitserve_options.gateway_table import GATEWAY_OPTIONS
from splitserve_options.observability_table import OBSERVABILITY_OPTIONS
from splitserve_options.option import (
    CACHE_ENV,
    CLIENT_ENV,
    CONFIG_ENV,
    DEFAULT_ADDRESS,
    DEFAULT_CLUSTER_ADDRESS,
    ENV_PREFIX,
    Command,
    Option,
    OptionKind,
)
from splitserve_options.robustness_table import ROBUSTNESS_OPTIONS
from splitserve_options.scheduling_table import SCHEDULING_OPTIONS
from splitserve_options.security_table import SECURITY_OPTIONS

_LIMITS, _NETWORK, _OTHER = "Limits of a step", "Network", "Process"
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")

OPTIONS: tuple[Option, ...] = (
    *EXECUTOR_OPTIONS,
    *GATEWAY_OPTIONS,
    *SECURITY_OPTIONS,
    Option(
        "max-num-seqs",
        OptionKind.INTEGER,
        "maximum number of sequences in one step",
        _LIMITS,
        default=256,
        minimum=1,
        maximum=65536,
    ),
    Option(
        "max-num-batched-tokens",
        OptionKind.INTEGER,
        "maximum number of tokens computed in one step; for a scheduler at least max-num-seqs",
        _LIMITS,
        default=2048,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "max-model-len",
        OptionKind.INTEGER,
        "maximum number of tokens of a sequence, prompt and output together",
        _LIMITS,
        default_text="the model's limit",
        minimum=2,
        maximum=2**31 - 1,
    ),
    Option(
        "pipeline-depth",
        OptionKind.INTEGER,
        "number of steps sent to an executor before the result of the first is back",
        _LIMITS,
        _SERVE_SCHEDULER,
        2,
        minimum=1,
        maximum=8,
    ),
    Option(
        "listen",
        OptionKind.ADDRESS,
        "address to listen on; port 0 means any free port",
        _NETWORK,
        default=DEFAULT_ADDRESS,
        default_of=(("executor", "127.0.0.1:0"),),
    ),
    Option(
        "scheduler",
        OptionKind.SCHEDULERS,
        "scheduler to register with (its cluster-listen); with several, the executor stays with "
        "one as long as it answers (same forms as schedulers of the gateway)",
        _NETWORK,
        ("executor",),
        DEFAULT_CLUSTER_ADDRESS,
        metavar="HOST:PORT,...",
    ),
    Option(
        "peers",
        OptionKind.SCHEDULERS,
        "other schedulers of the same model (their listen), to which clients are sent when this "
        "one stops (same forms as schedulers of the gateway)",
        _NETWORK,
        ("scheduler",),
        default_text="clients wait for this scheduler",
        metavar="HOST:PORT,...",
    ),
    Option(
        "move-after-s",
        OptionKind.NUMBER,
        "time that a preferred scheduler must answer before this executor moves to it, in "
        "seconds; extended at random to up to twice that",
        _NETWORK,
        ("executor",),
        30.0,
        minimum=0,
        maximum=86400,
    ),
    Option(
        "advertise-address",
        OptionKind.ADDRESS,
        "address at which the scheduler reaches this executor",
        _NETWORK,
        ("executor",),
        default_text="made from listen",
    ),
    Option(
        "num-executors",
        OptionKind.INTEGER,
        "executor processes to start",
        _NETWORK,
        ("serve",),
        1,
        minimum=1,
        maximum=64,
    ),
    *SCHEDULING_OPTIONS,
    *ADAPTERS_OPTIONS,
    *ROBUSTNESS_OPTIONS,
    *OBSERVABILITY_OPTIONS,
    Option(
        "no-demo",
        OptionKind.SWITCH,
        "do not stream a first completion to the terminal once ready",
        _OTHER,
        ("serve",),
        False,
    ),
    Option(
        "exit-on-stdin-eof",
        OptionKind.SWITCH,
        "stop when standard input is closed, which happens when the parent ends",
        _OTHER,
        ("scheduler", "executor", "gateway"),
        False,
        hidden=True,
    ),
)


Value = str | int | float | bool | None

# Origin as browsers send it: without a path, in lower case.
_ORIGIN = re.compile(r"https?://[^\s/,A-Z*@?#]+")
# DNS name, optionally with a wildcard as first label, without a port.
_HOST = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*", re.ASCII)
_SWITCH_WORDS = {
    "true": True, "1": True, "yes": True, "on": True,
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip
_EXCLUSIVE = ("num_device_blocks", "memory_fraction")
_DESCRIPTIONS: dict[Command, str] = {
    "serve": "Starts a scheduler and executors on this machine and serves until Ctrl-C.",
    "scheduler": "Runs one scheduler: accepts requests and decides what executors compute.",
    "executor": "Runs one executor: loads a model and registers with a scheduler.",
    "gateway": "Runs one gateway: OpenAI's HTTP API in front of one or more schedulers.",
}


class OptionError(Exception):
    """Error: a value is invalid. The message is one line for people."""


def parse(command: Command, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Value]:
    """Returns the options of `command` by name with underscores; optional ones may be None.

    Writes a line about unknown SPLITSERVE_ variables to standard error. Raises SystemExit: 0 after
    `--help`, 2 after one line on standard error that names option, source, value and allowed
    values.
    """
    try:
        values = resolve(command, argv, environ)
    except OptionError as error:
        sys.stderr.write(f"splitserve {command}: {error}\n")
        raise SystemExit(2) from error
    warning = unknown_variables(environ)
    if warning:
        sys.stderr.write(f"splitserve {command}: {warning}\n")
    return values


def resolve(command: Command, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Value]:
    """Same as `parse`, but raises OptionError and ignores unknown variables."""
    options = options_of(command)
    flags = _read_flags(command, argv)
    config = flags.pop("config", None) or environ.get(CONFIG_ENV)
    # An empty variable counts as absent: orchestrators pass unset values that way.
    variables = {option.key: environ[option.env] for option in options if environ.get(option.env)}
    layers: list[dict[str, Value]] = [
        {key: _from_text(_OPTION_OF_KEY[key], text, "flag") for key, text in flags.items()},
        {key: _from_text(_OPTION_OF_KEY[key], text, "env") for key, text in variables.items()},
        _read_file(str(config)) if config else {},
    ]
    values = {option.key: option.default_for(command) for option in options}
    for layer in reversed(layers):
        if all(key in layer for key in _EXCLUSIVE):
            first, second = (_OPTION_OF_KEY[key].name for key in _EXCLUSIVE)
            raise OptionError(f"{first} and {second} exclude each other; give one of them")
        for key in _EXCLUSIVE:
            if key in layer:
                values |= dict.fromkeys(set(_EXCLUSIVE) & values.keys(), None)
        values |= {key: value for key, value in layer.items() if key in values}
    return values


def options_of(command: Command) -> tuple[Option, ...]:
    """Returns the options of `command`."""
    return tuple(option for option in OPTIONS if command in option.commands)


def unknown_variables(environ: Mapping[str, str]) -> str:
    """Returns a line about SPLITSERVE_ variables that no process reads; empty if there are none."""
    known = {option.env for option in OPTIONS} | {CONFIG_ENV, *CACHE_ENV, *CLIENT_ENV}
    unknown = sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known)
    if not unknown:
        return ""
    return "ignored environment variables: " + ", ".join(
        name + _did_you_mean(name, known, " (", ")") for name in unknown
    )


# -- Flags -----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises OptionError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


def _read_flags(command: Command, argv: Sequence[str]) -> dict[str, str]:
    """Returns the given flags, as text by key."""
    parser = _build_parser(command)
    flags, extra = parser.parse_known_args(list(argv))
    if extra:
        raise OptionError(_unknown_argument(command, extra[0]))
    given = {key: value for key, value in vars(flags).items() if value is not None}
    return {key: ",".join(v) if isinstance(v, list) else v for key, v in given.items()}


def _build_parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"splitserve {command}",
        usage=f"splitserve {command} [--config FILE] [options]",
        description=_DESCRIPTIONS[command],
        epilog="A flag overrides its environment variable, which overrides the key of the same "
        "name in the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file (env {CONFIG_ENV})")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options_of(command):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        text = argparse.SUPPRESS if option.hidden else _help(option, command)
        add = groups[option.group].add_argument
        if option.kind is OptionKind.SWITCH:
            add(option.flag, dest=option.key, action="store_const", const="true", help=text)
        else:
            action = "append" if option.kind is OptionKind.ADAPTERS else "store"
            add(option.flag, dest=option.key, action=action, metavar=_metavar(option), help=text)
    return parser


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    names = {OptionKind.INTEGER: "N", OptionKind.NUMBER: "X", OptionKind.ADDRESS: "HOST:PORT"}
    return option.metavar or names.get(option.kind, "TEXT")


def _help(option: Option, command: Command) -> str:
    default = option.default_for(command)
    text = option.default_text or ("" if option.kind is OptionKind.SWITCH else str(default))
    parts = [option.help]
    if option.kind in (OptionKind.INTEGER, OptionKind.NUMBER):
        parts.append(option.allowed)
    if text:
        parts.append(f"default: {text}")
    parts.append(f"env {option.env}")
    return "; ".join(parts).replace("%", "%%")


def _unknown_argument(command: Command, argument: str) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {argument!r}; every option has a name, see --help"
    for option in OPTIONS:
        if option.flag == name:
            return f"{name} is an option of {' and '.join(option.commands)}, not of {command}"
    known = [option.flag for option in options_of(command) if not option.hidden] + ["--config"]
    return f"{name}: unknown option{_did_you_mean(name, known, '; ', '')}"


# -- Values ----------------------------------------------------------------------------------------


_SOURCES = {"flag": "flag", "env": "environment"}


def _from_text(option: Option, text: str, source: str) -> Value:
    """Returns the value of a flag or variable. Raises OptionError."""
    name = option.env if source == "env" else option.flag
    where = f"{name} ({_SOURCES[source]})"
    value: Value = text
    try:
        if option.kind is OptionKind.INTEGER:
            value = int(text)
        elif option.kind is OptionKind.NUMBER:
            value = float(text)
        elif option.kind is OptionKind.SWITCH:
            value = _SWITCH_WORDS[text.lower()]
    except (ValueError, KeyError) as error:
        raise _refusal(option, where, text) from error
    return _checked(option, value, where)


def _checked(option: Option, value: object, where: str) -> Value:
    """Returns `value` in the type of the option and within its range. Raises OptionError."""
    match option.kind:
        case OptionKind.INTEGER:
            fits = isinstance(value, int) and not isinstance(value, bool)
        case OptionKind.NUMBER:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            value = float(value) if fits else value  # type: ignore[arg-type]
        case OptionKind.SWITCH:
            fits = isinstance(value, bool)
        case OptionKind.CHOICE:
            fits = value in option.choices
        case kind:
            fits = isinstance(value, str) and _TEXT_CHECKS[kind](value)
    if not fits or (isinstance(value, int | float) and not _in_range(option, value)):
        raise _refusal(option, where, value)
    return value  # type: ignore[return-value]


def _in_range(option: Option, value: float) -> bool:
    if not math.isfinite(value) or (option.above and value == option.minimum):
        return False
    above = option.minimum is None or value >= option.minimum
    return above and (option.maximum is None or value <= option.maximum)


def _are_schedulers(text: str) -> bool:
    try:
        check_schedulers(text)
    except ValueError:
        return False
    return True


def _are_adapters(text: str) -> bool:
    pairs = [entry.partition("=") for entry in text.split(",")]
    return all(name.strip() and folder.strip() for name, _, folder in pairs)


def _are_origins(text: str) -> bool:
    return text == "*" or all(map(_ORIGIN.fullmatch, text.split(",")))


def _are_hosts(text: str) -> bool:
    return text == "*" or all(map(_HOST.fullmatch, text.split(",")))


_TEXT_CHECKS: Mapping[OptionKind, Callable[[str], bool]] = {
    OptionKind.ADDRESS: is_address,
    OptionKind.SCHEDULERS: _are_schedulers,
    OptionKind.ADAPTERS: _are_adapters,
    OptionKind.ORIGINS: _are_origins,
    OptionKind.HOSTS: _are_hosts,
    OptionKind.TEXT: lambda text: bool(text.strip()),
}


def _refusal(option: Option, where: str, value: object) -> OptionError:
    return OptionError(f"{where}: {value!r} is invalid; allowed: {option.allowed}")


# -- File ------------------------------------------------------------------------------------------


def _read_file(path: str) -> dict[str, Value]:
    """Returns the values of a TOML file, including options of other commands.

    Raises OptionError.
    """
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"config file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise OptionError(f"config file {path}: not valid TOML: {error}") from error
    values: dict[str, Value] = {}
    for name, value in content.items():
        key = name.replace("-", "_")
        if key not in _OPTION_OF_KEY:
            names = [option.name for option in OPTIONS]
            hint = _did_you_mean(name, names, "; ", "")
            raise OptionError(f"{name} (file {path}): unknown option{hint}")
        if key in values:
            raise OptionError(f"{name} (file {path}): set twice")
        values[key] = _checked(_OPTION_OF_KEY[key], value, f"{name} (file {path})")
    return values


_OPTION_OF_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


def _did_you_mean(name: str, known: Iterable[str], before: str, after: str) -> str:
    # The common prefix would make all names similar.
    candidates = {text.removeprefix(ENV_PREFIX): text for text in known}
    short = name.removeprefix(ENV_PREFIX)
    matches = difflib.get_close_matches(short, list(candidates), n=1, cutoff=0.7)
    return f"{before}did you mean {candidates[matches[0]]}?{after}" if matches else ""
