"""Every option of every process, declared once; `splitserve_rpc.options` reads them.

To add an option, add an entry to `OPTIONS`: flag, environment variable, key of the file, help and
the table in the README follow.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

Command = Literal["serve", "scheduler", "executor"]

COMMANDS: tuple[Command, ...] = ("serve", "scheduler", "executor")
BUNDLED_MODEL = "bundled"
DEFAULT_ADDRESS = "127.0.0.1:50051"
ENV_PREFIX = "SPLITSERVE_"
CONFIG_ENV = "SPLITSERVE_CONFIG"
# Variables of the same prefix that are read elsewhere: by the client commands.
CLIENT_ENV = ("SPLITSERVE_ADDRESS",)


class Kind(enum.Enum):
    """How the value of an option is written."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    CHOICE = "choice"
    ADDRESS = "host:port"
    SWITCH = "true or false"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `default` None means: not set; `default_text` then tells what happens.

    `minimum` and `maximum`, given together, are inclusive, the minimum unless `above` is set.
    `default_of` has the commands whose default is another one.
    """

    name: str
    kind: Kind
    help: str
    group: str
    commands: tuple[Command, ...] = COMMANDS
    default: str | int | float | bool | None = None
    default_of: tuple[tuple[Command, str | float], ...] = ()
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    metavar: str = ""
    hidden: bool = False

    @property
    def key(self) -> str:
        """The name in Python and in a parsed result."""
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        """The name on a command line."""
        return f"--{self.name}"

    @property
    def env(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.key.upper()

    def default_for(self, command: Command) -> str | int | float | bool | None:
        """The value that `command` gets when nobody sets it."""
        return dict(self.default_of).get(command, self.default)

    @property
    def allowed(self) -> str:
        """The values allowed, for people."""
        match self.kind:
            case Kind.CHOICE:
                return "one of " + ", ".join(self.choices)
            case Kind.INTEGER | Kind.NUMBER:
                return f"{'an integer' if self.kind is Kind.INTEGER else 'a number'}{self._range}"
            case Kind.ADDRESS:
                return "host:port"
            case Kind.SWITCH:
                return "true or false"
            case Kind.TEXT:
                return "a text that is not empty"

    @property
    def _range(self) -> str:
        if self.minimum is None or self.maximum is None:
            return ""
        start = f"above {self.minimum} and up" if self.above else f"from {self.minimum}"
        return f" {start} to {self.maximum}"


_MODEL, _MEMORY, _LIMITS = "Model", "KV cache", "Limits of a step"
_NETWORK, _POLICY, _ROBUST, _OTHER = "Network", "Scheduling", "Queue and failures", "Process"
_SERVE_EXECUTOR: tuple[Command, ...] = ("serve", "executor")
_SERVE_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        Kind.TEXT,
        "checkpoint: a directory, or a model id of the Hugging Face hub",
        _MODEL,
        _SERVE_EXECUTOR,
        BUNDLED_MODEL,
        default_text="bundled: the toy model that comes with splitserve",
        metavar="DIR_OR_HUB_ID",
    ),
    Option(
        "served-model-name",
        Kind.TEXT,
        "name that clients see",
        _MODEL,
        _SERVE_EXECUTOR,
        default_text="the last part of the model",
        metavar="NAME",
    ),
    Option(
        "dtype",
        Kind.CHOICE,
        "data type of weights, activations and KV cache",
        _MODEL,
        _SERVE_EXECUTOR,
        "auto",
        default_text="auto: the checkpoint's, as far as the device is good at it",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Option(
        "device",
        Kind.CHOICE,
        "where the model runs",
        _MODEL,
        _SERVE_EXECUTOR,
        "auto",
        default_text="auto: cuda where there is one",
        choices=("auto", "cpu", "cuda"),
    ),
    Option(
        "attention-backend",
        Kind.CHOICE,
        "what computes attention and, on a CPU, the decoders it knows",
        _MODEL,
        _SERVE_EXECUTOR,
        "auto",
        default_text="auto: the fastest that passes its trial at start",
        choices=("auto", "torch", "native", "triton", "flash-attn"),
    ),
    Option(
        "cuda-graphs",
        Kind.CHOICE,
        "record steps of decodes once and replay them, instead of launching each kernel",
        _MODEL,
        _SERVE_EXECUTOR,
        "auto",
        default_text="auto: on a GPU, where the attention backend allows it",
        choices=("auto", "off"),
    ),
    Option(
        "kv-cache-dtype",
        Kind.CHOICE,
        "data type of the KV cache; fp8 holds twice the tokens of a 16-bit one, on GPUs only",
        _MODEL,
        _SERVE_EXECUTOR,
        "auto",
        default_text="auto: that of the activations",
        choices=("auto", "fp8"),
    ),
    Option(
        "deterministic",
        Kind.SWITCH,
        "serve only if logits are the same bits in any batch, however tokens are cut into steps",
        _MODEL,
        _SERVE_EXECUTOR,
        False,
    ),
    Option(
        "quantization",
        Kind.CHOICE,
        "int8 (CPU): matrices rounded to 8 bits, for half the memory and faster small batches",
        _MODEL,
        _SERVE_EXECUTOR,
        "none",
        choices=("none", "int8"),
    ),
    Option(
        "threads",
        Kind.INTEGER,
        "CPU threads of an executor",
        _MODEL,
        _SERVE_EXECUTOR,
        default_text="torch's own choice",
        minimum=1,
        maximum=1024,
    ),
    Option(
        "block-size",
        Kind.INTEGER,
        "tokens per KV block",
        _MEMORY,
        _SERVE_EXECUTOR,
        default_text="16, but 256 where flash-attn attends",
        minimum=1,
        maximum=256,
    ),
    Option(
        "num-device-blocks",
        Kind.INTEGER,
        "KV blocks on the device; not together with memory-fraction",
        _MEMORY,
        _SERVE_EXECUTOR,
        default_text="as many as memory-fraction allows",
        minimum=1,
        maximum=2**31 - 1,
    ),
    Option(
        "memory-fraction",
        Kind.NUMBER,
        "share of the device's memory to use, on a CPU of what is free; not together with"
        " num-device-blocks",
        _MEMORY,
        _SERVE_EXECUTOR,
        default_text="0.9, on a CPU in at most 4 GiB",
        minimum=0,
        maximum=1,
        above=True,
    ),
    Option(
        "num-host-blocks",
        Kind.INTEGER,
        "KV blocks in host memory, for swapping; 0 for no swapping",
        _MEMORY,
        _SERVE_EXECUTOR,
        default_text="as many as on the device, in at most a quarter of the free memory",
        minimum=0,
        maximum=2**31 - 1,
    ),
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
        "most tokens computed in one step",
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
        Kind.ADDRESS,
        "the scheduler to register with",
        _NETWORK,
        ("executor",),
        DEFAULT_ADDRESS,
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
    Option(
        "queue-policy",
        Kind.CHOICE,
        "who is next: by arrival, by priority, by what the tenant was served, by deadline",
        _POLICY,
        _SERVE_SCHEDULER,
        "fcfs",
        choices=("fcfs", "priority", "fair", "deadline"),
    ),
    Option(
        "tenant-weights",
        Kind.TEXT,
        "shares of tenants for the queue policy fair; a tenant without one has 1",
        _POLICY,
        _SERVE_SCHEDULER,
        default_text="all alike",
        metavar="NAME=WEIGHT,...",
    ),
    Option(
        "batch-policy",
        Kind.CHOICE,
        "decodes and prompts in one step, or steps of whole prompts before steps of decodes",
        _POLICY,
        _SERVE_SCHEDULER,
        "mixed",
        choices=("mixed", "prefill-first"),
    ),
    Option(
        "delay-factor",
        Kind.NUMBER,
        "with prefill-first: prompts wait that many times as long as the last step of prompts took",
        _POLICY,
        _SERVE_SCHEDULER,
        0.0,
        minimum=0,
        maximum=1000,
    ),
    Option(
        "preemption-mode",
        Kind.CHOICE,
        "swap the KV of a preempted request to host memory, recompute it, or what costs less",
        _POLICY,
        _SERVE_SCHEDULER,
        "auto",
        choices=("auto", "swap", "recompute"),
    ),
    Option(
        "no-prefix-caching",
        Kind.SWITCH,
        "compute every prompt in full",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "no-host-prefix-cache",
        Kind.SWITCH,
        "do not keep cached blocks in host memory when the device needs their room",
        _POLICY,
        _SERVE_SCHEDULER,
        False,
    ),
    Option(
        "num-lookahead-slots",
        Kind.INTEGER,
        "KV slots that each sequence holds beyond its tokens, where there is room",
        _POLICY,
        _SERVE_SCHEDULER,
        0,
        minimum=0,
        maximum=1024,
    ),
    Option(
        "max-loras",
        Kind.INTEGER,
        "most distinct adapters in one step, as far as the executor can do as many",
        _POLICY,
        _SERVE_SCHEDULER,
        8,
        minimum=1,
        maximum=4096,
    ),
    Option(
        "max-num-waiting",
        Kind.INTEGER,
        "most requests that wait, per executor; further ones are refused with QUEUE_FULL",
        _ROBUST,
        _SERVE_SCHEDULER,
        1024,
        minimum=1,
        maximum=2**20,
    ),
    Option(
        "reconnect-timeout-s",
        Kind.NUMBER,
        "seconds a broken connection to an executor may take to come back before its requests move",
        _ROBUST,
        _SERVE_SCHEDULER,
        2.0,
        minimum=0,
        maximum=3600,
    ),
    Option(
        "step-timeout-s",
        Kind.NUMBER,
        "seconds a step may take before its executor counts as lost",
        _ROBUST,
        _SERVE_SCHEDULER,
        300.0,
        minimum=0,
        maximum=86400,
        above=True,
    ),
    Option(
        "drain-timeout-s",
        Kind.NUMBER,
        "seconds that unfinished requests get at shutdown",
        _ROBUST,
        _SERVE_SCHEDULER,
        10.0,
        default_of=(("serve", 2.0),),
        minimum=0,
        maximum=3600,
    ),
    Option(
        "log-level",
        Kind.CHOICE,
        "least urgent messages to log, on standard error",
        _OTHER,
        default="info",
        default_of=(("serve", "warning"),),
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        "journal",
        Kind.TEXT,
        "file that records what the scheduler is told (token ids of prompts too) and decides",
        _OTHER,
        _SERVE_SCHEDULER,
        default_text="nothing is recorded",
        metavar="FILE",
    ),
    Option(
        "journal-max-mib",
        Kind.INTEGER,
        "most MiB of both files of the journal together",
        _OTHER,
        _SERVE_SCHEDULER,
        256,
        minimum=2,
        maximum=2**20,
    ),
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
        ("scheduler", "executor"),
        False,
        hidden=True,
    ),
)
