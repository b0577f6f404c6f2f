"""What clients are served, by what executors say of themselves and by options."""

from __future__ import annotations

from scheduler_service.executors.membership import Membership
from scheduler_service.request_limits import message_bytes, most_message_bytes
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.sampling_params import MAX_SEQUENCES
from splitserve.executor.v1 import executor_pb2 as executor


class Served:
    """A model and its limits. `max_model_len`: of the option, None if it was not given."""

    def __init__(
        self, membership: Membership, scheduler: Scheduler, max_model_len: int | None
    ) -> None:
        self._membership = membership
        self._scheduler = scheduler
        self._max_model_len = max_model_len

    @property
    def model(self) -> executor.ModelInfo | None:
        """What the executors serve; None before one was connected."""
        return self._membership.model

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer of the model."""
        return self._membership.tokenizer_files

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Of the executor that takes the largest requests; None before the first."""
        return self._scheduler.capabilities.largest_config

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together, as some connected executor allows."""
        config = self.largest_config
        return config.max_len if config is not None else 0

    @property
    def max_num_sequences(self) -> int:
        """Most sequences of a request, as some connected executor allows."""
        return min(self._scheduler.capabilities.max_num_seqs, MAX_SEQUENCES)

    @property
    def max_message_bytes(self) -> int:
        """What a message of a client may have now; GetModel says it."""
        most_bytes = most_message_bytes(self._max_model_len)
        config = self.largest_config
        return most_bytes if config is None else message_bytes(config, most_bytes)
