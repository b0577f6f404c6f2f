"""Configuration of the scheduler: the fleet, scheduling policies, and each engine's executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Feature(Enum):
    """An optional ability of an executor."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    ADAPTERS = "adapters"
    ADAPTER_LOADING = "adapter_loading"
    CROSS_ATTENTION = "cross_attention"
    TOKEN_CONSTRAINTS = "token_constraints"
    GRAMMAR = "grammar"
    SEVERAL_TOKENS = "several_tokens"
    PARTIAL_RESULTS = "partial_results"
    MIN_P_AFTER_TOP_P = "min_p_after_top_p"


class BatchPolicyName(Enum):
    """Policies for the work that shares a step: prompts with decodes, or prompts apart."""

    MIXED = "mixed"
    PREFILL_FIRST = "prefill-first"


class Speculation(Enum):
    """Source of draft tokens."""

    OFF = "off"
    PROMPT_LOOKUP = "prompt-lookup"


class PreemptionMode(Enum):
    """Fate of a preempted request's KV. AUTO: the mode that is estimated to be cheaper."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of the scheduler for all executors: queue, quarantine, returns.

    `max_num_waiting`: places in the waiting queue for each executor. `max_executor_losses`:
    executors lost in succession after which a request of their steps is quarantined.
    `executor_return_s`: time for which an executor that left is expected back, in seconds.
    """

    queue_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_num_waiting: int = 1024
    max_executor_losses: int = 2
    executor_return_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Scheduling policies of every engine, whatever its executor.

    `separates_tenants`: the prefix cache never shares a block of one tenant with another tenant.
    `step_time_ms`: wanted duration of steps with prompts; 0 for no limit. `target_itl_ms`: the same
    for steps that have decodes, too, where it is shorter; 0 for none. Both only if prompts may be
    split.
    `max_run_ahead`: most tokens that a row may sample in one step by running on; 1 or less for
    none. `max_run_ahead_ms`: longest time of such a step; half of it behind another step, unless
    the executor reports parts of results.
    `max_draft_tokens`: most draft tokens of a row in one step. `max_num_encoder_tokens`: most
    encoder tokens that a step encodes, unless a single request brings more.
    """

    prefix_caching: bool = True
    host_prefix_cache: bool = True
    separates_tenants: bool = True
    step_time_ms: int = 0
    target_itl_ms: int = 0
    num_lookahead_slots: int = 0
    max_run_ahead: int = 1
    max_run_ahead_ms: int = 80
    speculation: Speculation = Speculation.OFF
    max_draft_tokens: int = 16
    max_num_encoder_tokens: int = 2048
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    batch_policy: BatchPolicyName = BatchPolicyName.MIXED
    delay_factor: float = 0.0
    queue_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


class HashKind(NamedTuple):
    """Parts of a configuration from which block hashes follow."""

    block_size: int
    model_digest: str
    separates_tenants: bool


@dataclass(frozen=True, slots=True)
class VectorSizes:
    """Vectors of a model: numbers of an embedding, and of a classifier's scores; 0 without them.

    `is_uncached`: rows have no blocks, and each is computed in one step.
    """

    embedding_size: int
    num_labels: int
    is_uncached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(PolicyConfig):
    """Configuration of one engine: its executor's pools, the model, limits of a step, policies.

    `sliding_window`: most tokens that a layer attends to, for every layer; None without a window.
    `max_encoder_tokens`: of a request, which then needs some; None if requests need none.
    `num_encoder_features`: of a request for a model that takes audio in place of encoder tokens;
    None for other models.
    `vectors`: of a model that returns vectors and no tokens. A vector takes the place of one token
    in `max_model_len`, and one block has room for each sequence of an uncached model.
    `max_adapters`: distinct adapters of one step. `num_adapter_slots`: adapters that the executor
    has loaded at once; 0 if it loads none but has its own. `max_params_bytes`: limit on the bytes
    of lists and texts in the sampling parameters of all running requests, equal parameters counted
    once, since a step may have to carry all of them; None for no limit. Raises ValueError that
    names the field, its value and the allowed range.
    """

    block_size: int
    num_device_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_waiting: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    features: frozenset[Feature] = frozenset(
        {
            Feature.LOGPROBS,
            Feature.PROMPT_LOGPROBS,
            Feature.PENALTIES,
            Feature.LOGIT_BIAS,
            Feature.TOKEN_CONSTRAINTS,
            Feature.MIN_P_AFTER_TOP_P,
        }
    )
    num_host_blocks: int = 0
    block_bytes: int = 0
    sliding_window: int | None = None
    max_encoder_tokens: int | None = None
    num_encoder_features: int | None = None
    vectors: VectorSizes | None = None
    max_adapters: int = 0
    num_adapter_slots: int = 0
    model_digest: str = ""
    max_params_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks the ranges. Raises ValueError."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; allowed: {least} or more")

    @property
    def hash_kind(self) -> HashKind:
        """Hash kind: engines of one kind give equal hashes to blocks with equal contents."""
        return HashKind(self.block_size, self.model_digest, self.separates_tenants)

    @property
    def is_uncached(self) -> bool:
        """Whether rows have no blocks, and each is computed in one step."""
        return self.vectors is not None and self.vectors.is_uncached

    @property
    def runs_ahead(self) -> bool:
        """Whether a row may get several tokens in one step by running on."""
        return self.max_run_ahead > 1 and Feature.SEVERAL_TOKENS in self.features

    @property
    def reports_parts(self) -> bool:
        """Whether the executor reports tokens of rows that run on before the step is done."""
        return self.runs_ahead and Feature.PARTIAL_RESULTS in self.features

    @property
    def speculates(self) -> bool:
        """Whether a row may get several tokens in one step by draft tokens."""
        is_wanted = self.speculation is not Speculation.OFF and self.max_draft_tokens > 0
        return is_wanted and Feature.SEVERAL_TOKENS in self.features

    @property
    def most_tokens(self) -> int:
        """Upper bound on the tokens of a row in one step."""
        most = self.max_run_ahead if self.runs_ahead else 1
        return most + self.max_draft_tokens if self.speculates else most

    @property
    def num_device_slots(self) -> int:
        """Number of tokens that the device pool holds."""
        return self.num_device_blocks * self.block_size

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence: the model's limit, or the capacity of the device pool."""
        return self.max_len_for(1, 1, 0)

    def max_len_for(self, num_prompt_tokens: int, num_sequences: int, num_cross_blocks: int) -> int:
        """Returns the most tokens of each of `num_sequences` that run together and share a prompt.

        With a sliding window, the pool holds sequences of any length if it holds their windows.
        Shared blocks are not counted then: they may be behind the window of one sequence and not of
        another.
        """
        num_blocks = self.num_device_blocks - num_cross_blocks
        num_shared = 0
        if self.sliding_window is not None:
            if num_blocks >= num_sequences * self.num_window_blocks:
                return self.max_model_len
        elif num_sequences > 1:
            num_shared = (num_prompt_tokens - 1) // self.block_size
        num_own = max(num_blocks - num_shared, 0) // num_sequences
        return min(self.max_model_len, (num_shared + num_own) * self.block_size)

    @property
    def num_window_blocks(self) -> int:
        """Number of blocks of a sequence's window, with one that a step may write beyond it."""
        assert self.sliding_window is not None
        return self.num_blocks_for(self.sliding_window) + 2

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


_LEAST = {
    "block_size": 1,
    "num_device_blocks": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "max_num_waiting": 1,
    "vocab_size": 1,
    "num_host_blocks": 0,
    "block_bytes": 0,
    "sliding_window": 1,
    "max_encoder_tokens": 1,
    "num_encoder_features": 1,
    "max_adapters": 0,
    "num_adapter_slots": 0,
    "max_params_bytes": 0,
    "step_time_ms": 0,
    "target_itl_ms": 0,
    "num_lookahead_slots": 0,
    "max_run_ahead": 0,
    "max_run_ahead_ms": 0,
    "max_draft_tokens": 0,
    "max_num_encoder_tokens": 1,
    "delay_factor": 0.0,
}
