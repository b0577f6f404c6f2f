"""Definition of an option."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

Command = Literal["serve", "scheduler", "executor", "gateway"]

COMMANDS: tuple[Command, ...] = ("serve", "scheduler", "executor", "gateway")
ENGINE: tuple[Command, ...] = ("serve", "scheduler", "executor")
BUNDLED_MODEL = "bundled"
DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_CLUSTER_ADDRESS = "127.0.0.1:50050"
ENV_PREFIX = "SPLITSERVE_"
CONFIG_ENV = "SPLITSERVE_CONFIG"
# Variables with the same prefix that the client commands read.
CLIENT_ENV = (
    "SPLITSERVE_ADDRESS",
    "SPLITSERVE_CLUSTER_ADDRESS",
    "SPLITSERVE_API_KEY",
    "SPLITSERVE_API_KEY_FILE",
)
# Variables that name directories of compiled CPU kernels and of remembered trials. Executors read
# them themselves; their container image sets both.
CACHE_ENV = ("SPLITSERVE_KERNEL_CACHE", "SPLITSERVE_TRIAL_CACHE")


class OptionKind(enum.Enum):
    """Kinds of values of an option."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    CHOICE = "choice"
    ADDRESS = "host:port"
    SCHEDULERS = "host:port,... or dns:host:port or file:path"
    ADAPTERS = "NAME=DIR,..."
    ORIGINS = "origin,..."
    HOSTS = "name,..."
    SWITCH = "true or false"


@dataclass(frozen=True, slots=True)
class Option:
    """Definition of one option.

    `default`: None means unset; `default_text` then describes the effect. `minimum`, `maximum`:
    both or none, inclusive; `above` excludes the minimum. `default_of`: defaults of commands that
    differ from `default`. `hidden`: not in the help.
    """

    name: str
    kind: OptionKind
    help: str
    group: str
    commands: tuple[Command, ...] = ENGINE
    default: str | int | float | bool | None = None
    default_of: tuple[tuple[Command, str | float | None], ...] = ()
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    metavar: str = ""
    hidden: bool = False

    @property
    def key(self) -> str:
        """Name in Python and in a parsed result."""
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        """Name on a command line."""
        return f"--{self.name}"

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.key.upper()

    def default_for(self, command: Command) -> str | int | float | bool | None:
        """Returns the default value of the option for `command`."""
        return dict(self.default_of).get(command, self.default)

    @property
    def allowed(self) -> str:
        """Text for people about the allowed values."""
        match self.kind:
            case OptionKind.CHOICE:
                return "one of " + ", ".join(self.choices)
            case OptionKind.INTEGER | OptionKind.NUMBER:
                number = "an integer" if self.kind is OptionKind.INTEGER else "a number"
                return f"{number}{self._range}"
            case OptionKind.ADDRESS:
                return "host:port"
            case OptionKind.SCHEDULERS:
                return "host:port, up to 64 of them separated by commas, dns:host:port or file:path"
            case OptionKind.ADAPTERS:
                return "NAME=DIR, several of them separated by commas"
            case OptionKind.ORIGINS:
                return "*, or origins like https://host:port, separated by commas"
            case OptionKind.HOSTS:
                return "*, or names separated by commas, like api.example.org,*.example.org"
            case OptionKind.SWITCH:
                return "true or false"
            case OptionKind.TEXT:
                return "a non-empty text"

    @property
    def _range(self) -> str:
        if self.minimum is None or self.maximum is None:
            return ""
        start = f"above {self.minimum} and up" if self.above else f"from {self.minimum}"
        return f" {start} to {self.maximum}"
