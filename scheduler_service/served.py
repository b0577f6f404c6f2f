"""Model and limits that clients are served, derived from executors and options."""

from __future__ import annotations

from scheduler_service.executors import Membership
from scheduler_service.request_limits import message_bytes, most_message_bytes
from scheduler_service.scheduler import Scheduler
from scheduler_service.scheduler.values import Feature, SchedulerConfig
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_contract import MAX_SEQUENCES


class Served:
    """Model that clients are served, and its limits at this moment.

    `max_model_len`: value of the option --max-model-len, None if it was not given.
    """

    def __init__(
        self, membership: Membership, scheduler: Scheduler, max_model_len: int | None
    ) -> None:
        self._membership = membership
        self._scheduler = scheduler
        self._max_model_len = max_model_len

    @property
    def model(self) -> executor.ModelInfo | None:
        """Model of the executors; None before an executor was connected."""
        return self._membership.model

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """Tokenizer files of the model, by name; empty if the executors offer no tokenizer."""
        return self._membership.tokenizer_files

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Limits of the executor that takes the largest requests; None before any joined."""
        return self._scheduler.capabilities.largest_config

    def has_feature(self, feature: Feature) -> bool:
        """Returns whether any registered executor has a feature.

        Without executors, the last one that served counts.
        """
        configs = [each.config for each in self._scheduler.executors.values()]
        last = self._scheduler.capabilities.last_config
        configs += [] if configs or last is None else [last]
        return any(feature in config.features for config in configs)

    @property
    def max_model_len(self) -> int:
        """Largest number of prompt and output tokens that some connected executor allows; or 0.

        Of a model that returns vectors: of prompt tokens.
        """
        config = self.largest_config
        if config is None:
            return 0
        return config.max_len if config.vectors is None else config.max_len - 1

    @property
    def max_encoder_tokens(self) -> int:
        """Most encoder tokens that some connected executor allows; 0 without an encoder."""
        config = self.largest_config
        return 0 if config is None else config.max_encoder_tokens or 0

    @property
    def max_num_sequences(self) -> int:
        """Largest number of sequences of one request that some connected executor allows."""
        return min(self._scheduler.capabilities.max_num_seqs, MAX_SEQUENCES)

    @property
    def max_message_bytes(self) -> int:
        """Limit of a client's message in bytes at this moment; GetModel returns it."""
        most_bytes = most_message_bytes(self._max_model_len)
        config = self.largest_config
        return most_bytes if config is None else message_bytes(config, most_bytes)
