"""The executor's configuration: the options of its command, as the option table checked them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from splitserve_metrics.address import MetricsAddress
from splitserve_rpc.cluster_identity import Role
from splitserve_rpc.security import Security, check_exposure


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Everything the executor process reads. None: the executor's own choice.

    `host_executors`: executors that are started together on this machine and share its memory.
    `runtime_dir`: where executors of this machine see what each other reserves.
    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `draft_model`: as
    `model`; None for none. `block_size`: tokens. `device_index`: among the GPUs that the process
    sees, from the first again beyond the last. `drain_timeout_s`: that its scheduler gets to let
    what runs end, or to move it. `memory_fraction`: of the device's memory. `num_host_blocks`: 0
    for no swapping. `threads`: of the CPU. Addresses are `host:port`. `scheduler`: as
    `splitserve_rpc.discovery` understands it.
    """

    model: str
    served_model_name: str | None
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
        """From parsed options. Their table has said already what each may be, and which exclude.

        Raises SecurityUnusable.
        """
        security = Security.from_options(values, Role.EXECUTOR)
        is_protected, insecure = security.protects_cluster, values["insecure"]
        check_exposure("listen", values["listen"], is_protected=is_protected, insecure=insecure)
        named = {key: value for key, value in values.items() if key in cls.__slots__}
        return cls(**named, security=security, metrics=MetricsAddress.from_options(values))


# -- The process in its own place once more, with other options ------------------------------------


def start_again(more_flags: Sequence[str], cluster_token: str | None) -> NoReturn:
    """Becomes what this process was started as, with `more_flags`, which go before all others.

    `cluster_token`: its file may have been a pipe, which says it only once; so there is another.
    """
    command = [sys.executable, *sys.orig_argv[1:], *more_flags]
    if cluster_token is not None:
        reading, writing = os.pipe()
        with open(writing, "w", encoding="ascii") as pipe:
            pipe.write(cluster_token)  # far less than a pipe holds
        os.set_inheritable(reading, True)
        command.append(f"--cluster-token-file=/dev/fd/{reading}")
    os.execv(sys.executable, command)
