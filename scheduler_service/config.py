"""The scheduler's configuration, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Limits of steps and queues, and patience with executors."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_num_waiting: int = 1024
    pipeline_depth: int = 2
    reconnect_timeout_s: float = 2.0
    step_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class SchedulerServiceConfig:
    """Everything the scheduler process reads."""

    listen: str
    cluster: ClusterConfig
    drain_timeout_s: float
    log_level: str
    exit_on_stdin_eof: bool

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> SchedulerServiceConfig:
        """From parsed options, whose types and ranges are checked already."""
        cluster = ClusterConfig(
            max_num_seqs=values["max_num_seqs"],
            max_num_batched_tokens=values["max_num_batched_tokens"],
            max_model_len=values["max_model_len"],
            max_num_waiting=values["max_num_waiting"],
            pipeline_depth=values["pipeline_depth"],
            reconnect_timeout_s=values["reconnect_timeout_s"],
            step_timeout_s=values["step_timeout_s"],
        )
        return cls(
            values["listen"],
            cluster,
            values["drain_timeout_s"],
            values["log_level"],
            values["exit_on_stdin_eof"],
        )
