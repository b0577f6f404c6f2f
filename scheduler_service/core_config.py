"""The configuration of a core: the tighter of what its executor can do and the operator wants."""

from __future__ import annotations

import logging

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.step_codec import decode_features
from splitserve.executor.v1 import executor_pb2 as executor

_log = logging.getLogger(__name__)

# What a step may take of the largest message: a token travels as input, as history and, with blocks
# of one token, as block id; a row has a dozen columns. What does not fit even so (the history of a
# long sequence, many logit biases) is caught when the batch is encoded.
MIN_MESSAGE_BYTES = 64 * 1024
_MESSAGE_BYTES_PER_TOKEN = 32
_MESSAGE_BYTES_PER_ROW = 128


def core_config(info: executor.ExecutorInfo, config: ClusterConfig) -> SchedulerConfig:
    """For the executor that `info` describes."""
    limits, model, policies = info.limits, info.model, config.policies
    max_rows = min(limits.max_num_rows, limits.max_message_bytes // _MESSAGE_BYTES_PER_ROW)
    max_tokens = min(
        limits.max_num_batched_tokens, limits.max_message_bytes // _MESSAGE_BYTES_PER_TOKEN
    )
    max_num_batched_tokens = min(config.max_num_batched_tokens, max_tokens)
    max_num_seqs = min(config.max_num_seqs, max_rows)
    if max_num_seqs > max_num_batched_tokens:
        _log.warning(
            "rows_limited_by_tokens address=%s max_num_seqs=%d max_num_batched_tokens=%d:"
            " a sequence without a token in a step would hold blocks for nothing",
            info.address,
            max_num_seqs,
            max_num_batched_tokens,
        )
        max_num_seqs = max_num_batched_tokens
    has_window = model.HasField("sliding_window_tokens")
    return SchedulerConfig(
        block_size=info.block_size_tokens,
        num_device_blocks=info.num_device_blocks,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(
            config.max_model_len or model.max_model_len_tokens, model.max_model_len_tokens
        ),
        max_num_waiting=config.max_num_waiting,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        features=decode_features(info.features),
        sliding_window=model.sliding_window_tokens if has_window else None,
        max_adapters=min(config.max_loras, limits.max_adapters_per_step),
        model_digest=model.digest,
        prefix_caching=policies.prefix_caching,
        host_prefix_cache=policies.host_prefix_cache,
        separates_tenants=policies.separates_tenants,
        num_lookahead_slots=policies.num_lookahead_slots,
        preemption_mode=policies.preemption_mode,
        batch_policy=policies.batch_policy,
        delay_factor=policies.delay_factor,
        queue_policy=policies.queue_policy,
        tenant_weights=policies.tenant_weights,
    )
