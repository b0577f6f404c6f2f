"""Writes the lists of all options into docs/options.md, docker-compose.yml and .env.example.

`--check` writes nothing; the exit code is 1 if one of them is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from splitserve_options import COMMANDS, OPTIONS, Command, Option, OptionKind, options_of

ROOT = Path(__file__).resolve().parents[1]
SERVICES: tuple[Command, ...] = ("scheduler", "executor", "gateway")
# What containers are to each other, which is in docker-compose.yml itself.
FIXED = frozenset(
    {"listen", "cluster-listen", "scheduler", "http", "schedulers", "insecure"}
    | {"live-listen", "live-schedulers"}
)
LISTED = tuple(option for option in OPTIONS if not option.hidden)


def markdown() -> str:
    """A table of all options."""
    lines = ["| option | of | default | what it is |", "|---|---|---|---|"]
    for option in LISTED:
        commands = "all" if option.commands == COMMANDS else ", ".join(option.commands)
        is_limited = option.kind in (OptionKind.INTEGER, OptionKind.NUMBER, OptionKind.CHOICE)
        text = f"{option.help} ({option.allowed})" if is_limited else option.help
        lines.append(f"| `{option.flag}` | {commands} | {_default_text(option)} | {text} |")
    return "\n".join(lines)


def _default_text(option: Option) -> str:
    if option.default_text:
        return option.default_text
    if option.kind is OptionKind.SWITCH:
        return "off"
    others = [f"{command}: `{value}`" for command, value in option.default_of]
    return "; ".join([f"`{option.default}`", *others])


def variables(service: Command) -> str:
    """The variables that docker-compose passes on to `service`, by name alone."""
    passed_on = [o for o in options_of(service) if not o.hidden and o.name not in FIXED]
    return "\n".join(f"      - {option.env}" for option in passed_on)


def example(service: Command | None) -> str:
    """The variables of this service alone, None: of several, with their defaults, as comments."""
    lines = []
    for option in LISTED:
        services = [name for name in SERVICES if name in option.commands]
        is_wanted = services == [service] if service else len(services) > 1
        if is_wanted and option.name not in FIXED:
            lines.append(f"#{option.env}={_written(option.default)}")
    return "\n".join(lines)


def _written(value: str | float | None) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


LISTS: dict[str, dict[str, str]] = {
    "docs/options.md": {"options": markdown()},
    "docker-compose.yml": {service: variables(service) for service in SERVICES},
    ".env.example": {
        "several": example(None),
        **{service: example(service) for service in SERVICES},
    },
}


def main(argv: Sequence[str]) -> int:
    """Writes or checks the lists; returns the exit code."""
    outdated = []
    for name, lists in LISTS.items():
        path = ROOT / name
        old = new = path.read_text()
        for title, content in lists.items():
            # A list stands between two lines that say so, in the comments of its file.
            pattern = rf"(?ms)^([^\n]*\b{title}:begin\b[^\n]*\n).*?(^[^\n]*\b{title}:end\b)"
            new, count = re.subn(pattern, lambda m, text=content: f"{m[1]}{text}\n{m[2]}", new)
            assert count == 1, f"{name} has {count} places for the list {title}"
        if new != old:
            outdated.append(name)
            if "--check" not in argv:
                path.write_text(new)
    if "--check" in argv and outdated:
        sys.stderr.write(f"outdated: {', '.join(outdated)}; `make options` writes them\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
