"""Whether the options of a process, from its file and the environment, can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_options.option import Command, Kind
from splitserve_options.options import OptionError, Value, options_of, resolve, unknown_variables


def check_settings(
    command: Command, config: Path | None, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Value]]:
    """And what they are; nothing if they cannot be used."""
    name = f"options of {command}"
    flags: Sequence[str] = [] if config is None else [f"--config={config}"]
    try:
        values = resolve(command, flags, environ)
    except OptionError as error:
        return [wrong(name, str(error), f"splitserve {command} does not start", "mend it")], {}
    findings = [ok(name, "can be used")]
    if unknown := unknown_variables(environ):
        findings.append(warning("environment", unknown, "nobody reads them", "look at their names"))
    return findings, values


def listened_at(command: Command, values: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """The options that say where a process listens, and the addresses."""
    for option in options_of(command):
        value = values.get(option.key)
        is_own = "listen" in option.name or option.name == "http"
        if option.kind is Kind.ADDRESS and is_own and isinstance(value, str):
            for address in _addresses(command, option.name, value, values):
                yield option.name, address


def _addresses(
    command: Command, name: str, address: str, values: Mapping[str, Value]
) -> Iterator[str]:
    """Where `serve` has its processes read, each has an address of its own."""
    host, _, port = address.rpartition(":")
    if (command, name) != ("serve", "metrics-listen") or not int(port):
        yield address
        return
    num_executors = values.get("num_executors") or 1
    assert isinstance(num_executors, int)
    # Scheduler, gateway, executors: as `serve_config.metrics_flags` has them.
    for each in range(2 + num_executors):
        yield f"{host}:{int(port) + each}"
