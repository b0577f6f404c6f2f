"""Configuration of the executor: the checked options of its command, and its restart with more."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from splitserve_metrics import MetricsAddress
from splitserve_rpc import Role, Security, check_exposure


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Configuration of the executor process. None leaves a value to the executor's choice.

    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `draft_model`: likewise;
    None for no draft model. `task`: what the model is for, or "auto" for what its files say.
    `device_index`: index among the GPUs that the process sees, modulo their number. `block_size`:
    tokens. `memory_fraction`: share of the device's memory. `num_host_blocks`: 0 turns swapping
    off. `host_executors`: number of executors that are started together on this machine and share
    its memory. `runtime_dir`: directory in which executors of this machine see each other's
    reservations. `max_adapters`: number of adapters that may be loaded at once and used by one
    step; 0 turns adapters off. `threads`: CPU threads. Addresses are `host:port`. `scheduler`: in
    the format of `splitserve_common.scheduler_discovery`. `drain_timeout_s`: time for the scheduler
    to finish or move the running requests.
    """

    model: str
    served_model_name: str | None
    task: str
    draft_model: str | None
    dtype: str
    device: str
    device_index: int
    attention_backend: str
    flash_attn_3_from: str
    cuda_graphs: str
    kv_cache_dtype: str
    deterministic: bool
    quantization: str
    block_size: int | None
    num_device_blocks: int | None
    memory_fraction: float | None
    num_host_blocks: int | None
    host_executors: int
    runtime_dir: str | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_adapters: int
    max_adapter_rank: int
    threads: int | None
    listen: str
    advertise_address: str | None
    scheduler: str
    drain_timeout_s: float
    move_after_s: float
    exit_on_stdin_eof: bool
    security: Security
    metrics: MetricsAddress | None = None

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> ExecutorConfig:
        """Builds the configuration from parsed options.

        The option table has already checked the allowed values and combinations. Raises
        SecurityUnusable.
        """
        security = Security.from_options(values, Role.EXECUTOR)
        is_protected, insecure = security.protects_cluster, values["insecure"]
        check_exposure("listen", values["listen"], is_protected=is_protected, insecure=insecure)
        named = {key: value for key, value in values.items() if key in cls.__slots__}
        return cls(**named, security=security, metrics=MetricsAddress.from_options(values))


# -- Restart of the process with more options ------------------------------------------------------


def start_again(more_flags: Sequence[str], cluster_token: str | None) -> NoReturn:
    """Replaces this process by a new run of its command, with `more_flags` in addition.

    `more_flags` come last on the command line, so they win. `cluster_token`: handed on through a
    new pipe, because the file of the first run may have been a pipe, which can be read only once.
    """
    command = [sys.executable, *sys.orig_argv[1:], *more_flags]
    if cluster_token is not None:
        reading, writing = os.pipe()
        with open(writing, "w", encoding="ascii") as pipe:
            pipe.write(cluster_token)  # far less than a pipe holds
        os.set_inheritable(reading, True)
        command.append(f"--cluster-token-file=/dev/fd/{reading}")
    os.execv(sys.executable, command)
