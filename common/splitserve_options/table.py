"""Table of all options of all processes; `splitserve_options.options` parses them.

To add an option, add an entry to a tuple here or in a module named `*_table`. The flag, environment
variable, key of the file, help and the row in docs/options.md follow from the entry.
"""

from __future__ import annotations

from splitserve_options.executor_table import EXECUTOR_OPTIONS
from splitserve_options.gateway_table import GATEWAY_OPTIONS
from splitserve_options.observability_table import OBSERVABILITY_OPTIONS
from splitserve_options.option import (
    DEFAULT_ADDRESS,
    DEFAULT_CLUSTER_ADDRESS,
    Command,
    Kind,
    Option,
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
        Kind.INTEGER,
        "most sequences in one step",
        _LIMITS,
        default=256,
        minimum=1,
        maximum=65536,
    ),
    Option(
        "max-num-batched-tokens",
        Kind.INTEGER,
        "most tokens computed in one step; at least max-num-seqs for a scheduler",
        _LIMITS,
        default=2048,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "max-model-len",
        Kind.INTEGER,
        "most tokens of a sequence, prompt and output together",
        _LIMITS,
        default_text="what the model allows",
        minimum=2,
        maximum=2**31 - 1,
    ),
    Option(
        "pipeline-depth",
        Kind.INTEGER,
        "steps sent to an executor before the result of the first is back",
        _LIMITS,
        _SERVE_SCHEDULER,
        2,
        minimum=1,
        maximum=8,
    ),
    Option(
        "listen",
        Kind.ADDRESS,
        "address to listen on; port 0 means any free port",
        _NETWORK,
        default=DEFAULT_ADDRESS,
        default_of=(("executor", "127.0.0.1:0"),),
    ),
    Option(
        "scheduler",
        Kind.SCHEDULERS,
        "the scheduler to register with: its cluster-listen; of several (as for schedulers of the "
        "gateway) one at a time, the same one as long as it answers",
        _NETWORK,
        ("executor",),
        DEFAULT_CLUSTER_ADDRESS,
        metavar="HOST:PORT,...",
    ),
    Option(
        "peers",
        Kind.SCHEDULERS,
        "other schedulers of the same model that clients are sent to when this one is stopped: "
        "their listen, as for schedulers of the gateway",
        _NETWORK,
        ("scheduler",),
        default_text="clients wait for this one to come back",
        metavar="HOST:PORT,...",
    ),
    Option(
        "move-after-s",
        Kind.NUMBER,
        "seconds for which a scheduler that this executor prefers has to answer before it moves "
        "there, and at random up to twice that",
        _NETWORK,
        ("executor",),
        30.0,
        minimum=0,
        maximum=86400,
    ),
    Option(
        "advertise-address",
        Kind.ADDRESS,
        "address under which the scheduler reaches this executor",
        _NETWORK,
        ("executor",),
        default_text="made from listen",
    ),
    Option(
        "num-executors",
        Kind.INTEGER,
        "executor processes to start",
        _NETWORK,
        ("serve",),
        1,
        minimum=1,
        maximum=64,
    ),
    *SCHEDULING_OPTIONS,
    *ROBUSTNESS_OPTIONS,
    *OBSERVABILITY_OPTIONS,
    Option(
        "no-demo",
        Kind.SWITCH,
        "do not stream a first completion to the terminal once ready",
        _OTHER,
        ("serve",),
        False,
    ),
    Option(
        "exit-on-stdin-eof",
        Kind.SWITCH,
        "stop when standard input ends, for a parent that holds the other end",
        _OTHER,
        ("scheduler", "executor", "gateway"),
        False,
        hidden=True,
    ),
)
