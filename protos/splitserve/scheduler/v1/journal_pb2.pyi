from splitserve.scheduler.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalEntry(_message.Message):
    __slots__ = ("core", "now_ns", "raised", "header", "core_created", "core_checkpoint", "add", "readmit", "abort", "evacuate", "schedule", "apply", "take_ended", "withdraw")
    CORE_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CORE_CREATED_FIELD_NUMBER: _ClassVar[int]
    CORE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    READMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    EVACUATE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    TAKE_ENDED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    core: int
    now_ns: int
    raised: str
    header: JournalHeader
    core_created: CoreCreated
    core_checkpoint: CoreCheckpoint
    add: CoreAdd
    readmit: CoreReadmit
    abort: CoreAbort
    evacuate: CoreEvacuate
    schedule: CoreSchedule
    apply: CoreApply
    take_ended: CoreTakeEnded
    withdraw: CoreWithdraw
    def __init__(self, core: _Optional[int] = ..., now_ns: _Optional[int] = ..., raised: _Optional[str] = ..., header: _Optional[_Union[JournalHeader, _Mapping]] = ..., core_created: _Optional[_Union[CoreCreated, _Mapping]] = ..., core_checkpoint: _Optional[_Union[CoreCheckpoint, _Mapping]] = ..., add: _Optional[_Union[CoreAdd, _Mapping]] = ..., readmit: _Optional[_Union[CoreReadmit, _Mapping]] = ..., abort: _Optional[_Union[CoreAbort, _Mapping]] = ..., evacuate: _Optional[_Union[CoreEvacuate, _Mapping]] = ..., schedule: _Optional[_Union[CoreSchedule, _Mapping]] = ..., apply: _Optional[_Union[CoreApply, _Mapping]] = ..., take_ended: _Optional[_Union[CoreTakeEnded, _Mapping]] = ..., withdraw: _Optional[_Union[CoreWithdraw, _Mapping]] = ...) -> None: ...

class JournalHeader(_message.Message):
    __slots__ = ("journal_version", "software_version", "first_event")
    JOURNAL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    journal_version: int
    software_version: str
    first_event: int
    def __init__(self, journal_version: _Optional[int] = ..., software_version: _Optional[str] = ..., first_event: _Optional[int] = ...) -> None: ...

class CoreIdentity(_message.Message):
    __slots__ = ("address", "executor_epoch", "scheduler_epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    executor_epoch: int
    scheduler_epoch: int
    def __init__(self, address: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class CoreCreated(_message.Message):
    __slots__ = ("identity", "config", "last_step_id")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    identity: CoreIdentity
    config: CoreConfig
    last_step_id: int
    def __init__(self, identity: _Optional[_Union[CoreIdentity, _Mapping]] = ..., config: _Optional[_Union[CoreConfig, _Mapping]] = ..., last_step_id: _Optional[int] = ...) -> None: ...

class CoreCheckpoint(_message.Message):
    __slots__ = ("identity", "scheduler", "core_structure")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    CORE_STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    identity: CoreIdentity
    scheduler: bytes
    core_structure: str
    def __init__(self, identity: _Optional[_Union[CoreIdentity, _Mapping]] = ..., scheduler: _Optional[bytes] = ..., core_structure: _Optional[str] = ...) -> None: ...

class CoreConfig(_message.Message):
    __slots__ = ("block_size", "num_device_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_waiting", "vocab_size", "eos_token_ids", "features", "num_host_blocks", "block_bytes", "sliding_window", "max_adapters", "model_digest", "prefix_caching", "host_prefix_cache", "num_lookahead_slots", "preemption_mode", "batch_policy", "delay_factor", "queue_policy", "tenant_weights", "separates_tenants", "max_params_bytes", "max_run_ahead", "max_run_ahead_ms", "speculation", "max_draft_tokens")
    class TenantWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    HOST_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_MODE_FIELD_NUMBER: _ClassVar[int]
    BATCH_POLICY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POLICY_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SEPARATES_TENANTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARAMS_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_RUN_AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_device_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_waiting: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: _containers.RepeatedScalarFieldContainer[str]
    num_host_blocks: int
    block_bytes: int
    sliding_window: int
    max_adapters: int
    model_digest: str
    prefix_caching: bool
    host_prefix_cache: bool
    num_lookahead_slots: int
    preemption_mode: str
    batch_policy: str
    delay_factor: float
    queue_policy: str
    tenant_weights: _containers.ScalarMap[str, float]
    separates_tenants: bool
    max_params_bytes: int
    max_run_ahead: int
    max_run_ahead_ms: int
    speculation: str
    max_draft_tokens: int
    def __init__(self, block_size: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_waiting: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[str]] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., sliding_window: _Optional[int] = ..., max_adapters: _Optional[int] = ..., model_digest: _Optional[str] = ..., prefix_caching: bool = ..., host_prefix_cache: bool = ..., num_lookahead_slots: _Optional[int] = ..., preemption_mode: _Optional[str] = ..., batch_policy: _Optional[str] = ..., delay_factor: _Optional[float] = ..., queue_policy: _Optional[str] = ..., tenant_weights: _Optional[_Mapping[str, float]] = ..., separates_tenants: bool = ..., max_params_bytes: _Optional[int] = ..., max_run_ahead: _Optional[int] = ..., max_run_ahead_ms: _Optional[int] = ..., speculation: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class CoreAdd(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: JournaledRequest
    def __init__(self, request: _Optional[_Union[JournaledRequest, _Mapping]] = ...) -> None: ...

class CoreReadmit(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: JournaledRequest
    def __init__(self, request: _Optional[_Union[JournaledRequest, _Mapping]] = ...) -> None: ...

class CoreAbort(_message.Message):
    __slots__ = ("request_id", "found")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    found: bool
    def __init__(self, request_id: _Optional[str] = ..., found: bool = ...) -> None: ...

class CoreWithdraw(_message.Message):
    __slots__ = ("request_id", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request: EvacuatedRequest
    def __init__(self, request_id: _Optional[str] = ..., request: _Optional[_Union[EvacuatedRequest, _Mapping]] = ...) -> None: ...

class CoreEvacuate(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[EvacuatedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[EvacuatedRequest, _Mapping]]] = ...) -> None: ...

class EvacuatedRequest(_message.Message):
    __slots__ = ("request_id", "num_tokens", "error_reason", "state_crc32")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_CRC32_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    error_reason: str
    state_crc32: int
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., error_reason: _Optional[str] = ..., state_crc32: _Optional[int] = ...) -> None: ...

class CoreSchedule(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: bytes
    def __init__(self, batch: _Optional[bytes] = ...) -> None: ...

class CoreApply(_message.Message):
    __slots__ = ("result", "num_rows", "events")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    num_rows: int
    events: CoreEvents
    def __init__(self, result: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., events: _Optional[_Union[CoreEvents, _Mapping]] = ...) -> None: ...

class CoreTakeEnded(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: CoreEvents
    def __init__(self, events: _Optional[_Union[CoreEvents, _Mapping]] = ...) -> None: ...

class CoreEvents(_message.Message):
    __slots__ = ("num_tokens", "tokens_crc32", "num_prompt_logprobs", "finished_sequences", "finished")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    tokens_crc32: int
    num_prompt_logprobs: int
    finished_sequences: _containers.RepeatedScalarFieldContainer[str]
    finished: _containers.RepeatedCompositeFieldContainer[EndedRequest]
    def __init__(self, num_tokens: _Optional[int] = ..., tokens_crc32: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., finished_sequences: _Optional[_Iterable[str]] = ..., finished: _Optional[_Iterable[_Union[EndedRequest, _Mapping]]] = ...) -> None: ...

class EndedRequest(_message.Message):
    __slots__ = ("request_id", "finish_reason", "error_reason", "num_output_tokens", "output_crc32", "num_cached_tokens", "num_preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    finish_reason: str
    error_reason: str
    num_output_tokens: int
    output_crc32: int
    num_cached_tokens: int
    num_preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., finish_reason: _Optional[str] = ..., error_reason: _Optional[str] = ..., num_output_tokens: _Optional[int] = ..., output_crc32: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class JournaledRequest(_message.Message):
    __slots__ = ("request_id", "params", "scheduling", "arrival", "client_key", "prompt_token_ids", "encoder_token_ids", "sequences", "num_preemptions", "num_cached_tokens", "num_fruitless_losses", "num_tokens_at_loss", "num_prompt_logprobs_sent", "num_bypasses", "is_protected", "num_forks", "num_candidates", "search", "trial_size", "num_trials_left", "was_in_flight", "submitted_ns")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRUITLESS_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AT_LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYPASSES_FIELD_NUMBER: _ClassVar[int]
    IS_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FORKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    TRIAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIALS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WAS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    params: JournaledSamplingParams
    scheduling: JournaledSchedulingParams
    arrival: int
    client_key: int
    prompt_token_ids: bytes
    encoder_token_ids: bytes
    sequences: _containers.RepeatedCompositeFieldContainer[JournaledSequence]
    num_preemptions: int
    num_cached_tokens: int
    num_fruitless_losses: int
    num_tokens_at_loss: int
    num_prompt_logprobs_sent: int
    num_bypasses: int
    is_protected: bool
    num_forks: int
    num_candidates: int
    search: JournaledBeamSearch
    trial_size: int
    num_trials_left: int
    was_in_flight: bool
    submitted_ns: int
    def __init__(self, request_id: _Optional[str] = ..., params: _Optional[_Union[JournaledSamplingParams, _Mapping]] = ..., scheduling: _Optional[_Union[JournaledSchedulingParams, _Mapping]] = ..., arrival: _Optional[int] = ..., client_key: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., encoder_token_ids: _Optional[bytes] = ..., sequences: _Optional[_Iterable[_Union[JournaledSequence, _Mapping]]] = ..., num_preemptions: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_fruitless_losses: _Optional[int] = ..., num_tokens_at_loss: _Optional[int] = ..., num_prompt_logprobs_sent: _Optional[int] = ..., num_bypasses: _Optional[int] = ..., is_protected: bool = ..., num_forks: _Optional[int] = ..., num_candidates: _Optional[int] = ..., search: _Optional[_Union[JournaledBeamSearch, _Mapping]] = ..., trial_size: _Optional[int] = ..., num_trials_left: _Optional[int] = ..., was_in_flight: bool = ..., submitted_ns: _Optional[int] = ...) -> None: ...

class JournaledSequence(_message.Message):
    __slots__ = ("index", "output_token_ids", "seed", "settles_at_step", "cumulative_logprob", "scored", "is_finished", "finish_reason", "stop_token_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SETTLES_AT_STEP_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: bytes
    seed: int
    settles_at_step: int
    cumulative_logprob: float
    scored: _containers.RepeatedCompositeFieldContainer[JournaledScore]
    is_finished: bool
    finish_reason: str
    stop_token_id: int
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[bytes] = ..., seed: _Optional[int] = ..., settles_at_step: _Optional[int] = ..., cumulative_logprob: _Optional[float] = ..., scored: _Optional[_Iterable[_Union[JournaledScore, _Mapping]]] = ..., is_finished: bool = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class JournaledScore(_message.Message):
    __slots__ = ("position", "token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class JournaledSamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "num_logprobs", "num_prompt_logprobs", "n", "best_of", "beam", "allowed_token_ids", "bad_words_token_ids", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    num_prompt_logprobs: int
    n: int
    best_of: int
    beam: JournaledBeamParams
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[JournaledTokens]
    grammar: _scheduler_pb2.Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam: _Optional[_Union[JournaledBeamParams, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[JournaledTokens, _Mapping]]] = ..., grammar: _Optional[_Union[_scheduler_pb2.Grammar, _Mapping]] = ...) -> None: ...

class JournaledTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class JournaledBeamParams(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: str
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class JournaledSchedulingParams(_message.Message):
    __slots__ = ("priority", "tenant", "deadline_ns", "adapter", "cache_salt", "uses_prefix_cache", "num_public_prefix_tokens")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    USES_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    tenant: str
    deadline_ns: int
    adapter: str
    cache_salt: str
    uses_prefix_cache: bool
    num_public_prefix_tokens: int
    def __init__(self, priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_ns: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., uses_prefix_cache: bool = ..., num_public_prefix_tokens: _Optional[int] = ...) -> None: ...

class JournaledBeamSearch(_message.Message):
    __slots__ = ("max_tokens", "stop_token_ids", "num_tokens", "live", "ended")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    live: _containers.RepeatedCompositeFieldContainer[JournaledBeam]
    ended: _containers.RepeatedCompositeFieldContainer[JournaledBeam]
    def __init__(self, max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., live: _Optional[_Iterable[_Union[JournaledBeam, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[JournaledBeam, _Mapping]]] = ...) -> None: ...

class JournaledBeam(_message.Message):
    __slots__ = ("token_ids", "cumulative_logprob", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cumulative_logprob: float
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., cumulative_logprob: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...
