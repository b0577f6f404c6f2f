from splitserve.scheduler.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalEntry(_message.Message):
    __slots__ = ("now_ns", "raised", "header", "scheduler_created", "scheduler_checkpoint", "request_submitted", "request_aborted", "executor_joined", "executor_connected", "executor_doubted", "executor_draining", "executor_drain_expired", "executor_undrained", "executor_lost", "step_completed", "tenants_weighed", "tick", "adapter_loaded", "adapter_registered", "step_progressed", "effects")
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_CREATED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ABORTED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_JOINED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_DOUBTED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_DRAINING_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_DRAIN_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_UNDRAINED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_LOST_FIELD_NUMBER: _ClassVar[int]
    STEP_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_WEIGHED_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    STEP_PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    raised: str
    header: JournalHeader
    scheduler_created: SchedulerCreated
    scheduler_checkpoint: SchedulerCheckpoint
    request_submitted: RequestSubmitted
    request_aborted: RequestAborted
    executor_joined: ExecutorJoined
    executor_connected: ExecutorConnected
    executor_doubted: ExecutorDoubted
    executor_draining: ExecutorDraining
    executor_drain_expired: ExecutorDrainExpired
    executor_undrained: ExecutorUndrained
    executor_lost: ExecutorLost
    step_completed: StepCompleted
    tenants_weighed: TenantsWeighed
    tick: Tick
    adapter_loaded: AdapterLoaded
    adapter_registered: AdapterRegistered
    step_progressed: StepProgressed
    effects: _containers.RepeatedCompositeFieldContainer[JournaledEffect]
    def __init__(self, now_ns: _Optional[int] = ..., raised: _Optional[str] = ..., header: _Optional[_Union[JournalHeader, _Mapping]] = ..., scheduler_created: _Optional[_Union[SchedulerCreated, _Mapping]] = ..., scheduler_checkpoint: _Optional[_Union[SchedulerCheckpoint, _Mapping]] = ..., request_submitted: _Optional[_Union[RequestSubmitted, _Mapping]] = ..., request_aborted: _Optional[_Union[RequestAborted, _Mapping]] = ..., executor_joined: _Optional[_Union[ExecutorJoined, _Mapping]] = ..., executor_connected: _Optional[_Union[ExecutorConnected, _Mapping]] = ..., executor_doubted: _Optional[_Union[ExecutorDoubted, _Mapping]] = ..., executor_draining: _Optional[_Union[ExecutorDraining, _Mapping]] = ..., executor_drain_expired: _Optional[_Union[ExecutorDrainExpired, _Mapping]] = ..., executor_undrained: _Optional[_Union[ExecutorUndrained, _Mapping]] = ..., executor_lost: _Optional[_Union[ExecutorLost, _Mapping]] = ..., step_completed: _Optional[_Union[StepCompleted, _Mapping]] = ..., tenants_weighed: _Optional[_Union[TenantsWeighed, _Mapping]] = ..., tick: _Optional[_Union[Tick, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterLoaded, _Mapping]] = ..., adapter_registered: _Optional[_Union[AdapterRegistered, _Mapping]] = ..., step_progressed: _Optional[_Union[StepProgressed, _Mapping]] = ..., effects: _Optional[_Iterable[_Union[JournaledEffect, _Mapping]]] = ...) -> None: ...

class JournalHeader(_message.Message):
    __slots__ = ("journal_version", "software_version", "first_event")
    JOURNAL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    journal_version: int
    software_version: str
    first_event: int
    def __init__(self, journal_version: _Optional[int] = ..., software_version: _Optional[str] = ..., first_event: _Optional[int] = ...) -> None: ...

class SchedulerCreated(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: FleetConfig
    def __init__(self, config: _Optional[_Union[FleetConfig, _Mapping]] = ...) -> None: ...

class FleetConfig(_message.Message):
    __slots__ = ("queue_policy", "tenant_weights", "max_num_waiting", "max_executor_losses", "executor_return_s")
    class TenantWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    QUEUE_POLICY_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_EXECUTOR_LOSSES_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_RETURN_S_FIELD_NUMBER: _ClassVar[int]
    queue_policy: str
    tenant_weights: _containers.ScalarMap[str, float]
    max_num_waiting: int
    max_executor_losses: int
    executor_return_s: float
    def __init__(self, queue_policy: _Optional[str] = ..., tenant_weights: _Optional[_Mapping[str, float]] = ..., max_num_waiting: _Optional[int] = ..., max_executor_losses: _Optional[int] = ..., executor_return_s: _Optional[float] = ...) -> None: ...

class SchedulerCheckpoint(_message.Message):
    __slots__ = ("scheduler", "structure", "executors")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    scheduler: bytes
    structure: str
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorIdentity]
    def __init__(self, scheduler: _Optional[bytes] = ..., structure: _Optional[str] = ..., executors: _Optional[_Iterable[_Union[ExecutorIdentity, _Mapping]]] = ...) -> None: ...

class ExecutorIdentity(_message.Message):
    __slots__ = ("address", "executor_epoch", "scheduler_epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    executor_epoch: int
    scheduler_epoch: int
    def __init__(self, address: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class RequestSubmitted(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: JournaledRequest
    def __init__(self, request: _Optional[_Union[JournaledRequest, _Mapping]] = ...) -> None: ...

class RequestAborted(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExecutorJoined(_message.Message):
    __slots__ = ("identity", "config", "num_credits", "last_step_id")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    NUM_CREDITS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    identity: ExecutorIdentity
    config: CoreConfig
    num_credits: int
    last_step_id: int
    def __init__(self, identity: _Optional[_Union[ExecutorIdentity, _Mapping]] = ..., config: _Optional[_Union[CoreConfig, _Mapping]] = ..., num_credits: _Optional[int] = ..., last_step_id: _Optional[int] = ...) -> None: ...

class ExecutorConnected(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ExecutorDoubted(_message.Message):
    __slots__ = ("address", "is_doubtful")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_DOUBTFUL_FIELD_NUMBER: _ClassVar[int]
    address: str
    is_doubtful: bool
    def __init__(self, address: _Optional[str] = ..., is_doubtful: bool = ...) -> None: ...

class ExecutorDraining(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ExecutorDrainExpired(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ExecutorUndrained(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("address", "adapter", "why_not")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    address: str
    adapter: str
    why_not: str
    def __init__(self, address: _Optional[str] = ..., adapter: _Optional[str] = ..., why_not: _Optional[str] = ...) -> None: ...

class AdapterRegistered(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class ExecutorLost(_message.Message):
    __slots__ = ("address", "cause", "why")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    address: str
    cause: str
    why: str
    def __init__(self, address: _Optional[str] = ..., cause: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class StepCompleted(_message.Message):
    __slots__ = ("address", "result", "unsent_step_id", "num_rows")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    UNSENT_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    address: str
    result: bytes
    unsent_step_id: int
    num_rows: int
    def __init__(self, address: _Optional[str] = ..., result: _Optional[bytes] = ..., unsent_step_id: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class StepProgressed(_message.Message):
    __slots__ = ("address", "result", "num_rows")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    address: str
    result: bytes
    num_rows: int
    def __init__(self, address: _Optional[str] = ..., result: _Optional[bytes] = ..., num_rows: _Optional[int] = ...) -> None: ...

class TenantsWeighed(_message.Message):
    __slots__ = ("weights",)
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.ScalarMap[str, float]
    def __init__(self, weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ("looks_everywhere",)
    LOOKS_EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    looks_everywhere: bool
    def __init__(self, looks_everywhere: bool = ...) -> None: ...

class JournaledEffect(_message.Message):
    __slots__ = ("send_step", "deliver_tokens", "request_finished", "request_assigned", "request_moved", "request_quarantined", "request_acquitted", "request_blamed", "executor_serves", "executor_health_changed", "engine_failed", "executor_gone", "wake_at", "load_adapter")
    SEND_STEP_FIELD_NUMBER: _ClassVar[int]
    DELIVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MOVED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ACQUITTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BLAMED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SERVES_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_HEALTH_CHANGED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FAILED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_GONE_FIELD_NUMBER: _ClassVar[int]
    WAKE_AT_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    send_step: SendStep
    deliver_tokens: DeliverTokens
    request_finished: EndedRequest
    request_assigned: RequestAssigned
    request_moved: RequestMoved
    request_quarantined: RequestQuarantined
    request_acquitted: RequestAcquitted
    request_blamed: RequestBlamed
    executor_serves: ExecutorServes
    executor_health_changed: ExecutorHealthChanged
    engine_failed: EngineFailed
    executor_gone: ExecutorGone
    wake_at: WakeAt
    load_adapter: LoadAdapter
    def __init__(self, send_step: _Optional[_Union[SendStep, _Mapping]] = ..., deliver_tokens: _Optional[_Union[DeliverTokens, _Mapping]] = ..., request_finished: _Optional[_Union[EndedRequest, _Mapping]] = ..., request_assigned: _Optional[_Union[RequestAssigned, _Mapping]] = ..., request_moved: _Optional[_Union[RequestMoved, _Mapping]] = ..., request_quarantined: _Optional[_Union[RequestQuarantined, _Mapping]] = ..., request_acquitted: _Optional[_Union[RequestAcquitted, _Mapping]] = ..., request_blamed: _Optional[_Union[RequestBlamed, _Mapping]] = ..., executor_serves: _Optional[_Union[ExecutorServes, _Mapping]] = ..., executor_health_changed: _Optional[_Union[ExecutorHealthChanged, _Mapping]] = ..., engine_failed: _Optional[_Union[EngineFailed, _Mapping]] = ..., executor_gone: _Optional[_Union[ExecutorGone, _Mapping]] = ..., wake_at: _Optional[_Union[WakeAt, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("address", "adapter", "kept")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    address: str
    adapter: str
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., adapter: _Optional[str] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class SendStep(_message.Message):
    __slots__ = ("address", "batch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    batch: bytes
    def __init__(self, address: _Optional[str] = ..., batch: _Optional[bytes] = ...) -> None: ...

class DeliverTokens(_message.Message):
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

class RequestAssigned(_message.Message):
    __slots__ = ("request_id", "address", "assignment")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    address: str
    assignment: JournaledAssignment
    def __init__(self, request_id: _Optional[str] = ..., address: _Optional[str] = ..., assignment: _Optional[_Union[JournaledAssignment, _Mapping]] = ...) -> None: ...

class JournaledAssignment(_message.Message):
    __slots__ = ("why", "num_cached", "num_ahead", "num_running", "cost_us", "num_cached_elsewhere", "cost_elsewhere_us")
    WHY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    COST_US_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    COST_ELSEWHERE_US_FIELD_NUMBER: _ClassVar[int]
    why: str
    num_cached: int
    num_ahead: int
    num_running: int
    cost_us: int
    num_cached_elsewhere: int
    cost_elsewhere_us: int
    def __init__(self, why: _Optional[str] = ..., num_cached: _Optional[int] = ..., num_ahead: _Optional[int] = ..., num_running: _Optional[int] = ..., cost_us: _Optional[int] = ..., num_cached_elsewhere: _Optional[int] = ..., cost_elsewhere_us: _Optional[int] = ...) -> None: ...

class RequestMoved(_message.Message):
    __slots__ = ("request", "address", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: RequestState
    address: str
    reason: str
    def __init__(self, request: _Optional[_Union[RequestState, _Mapping]] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RequestQuarantined(_message.Message):
    __slots__ = ("request_id", "num_trials_left")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIALS_LEFT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_trials_left: int
    def __init__(self, request_id: _Optional[str] = ..., num_trials_left: _Optional[int] = ...) -> None: ...

class RequestAcquitted(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RequestBlamed(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExecutorServes(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ExecutorHealthChanged(_message.Message):
    __slots__ = ("address", "change")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    address: str
    change: str
    def __init__(self, address: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class EngineFailed(_message.Message):
    __slots__ = ("address", "call", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    call: str
    error: str
    def __init__(self, address: _Optional[str] = ..., call: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ExecutorGone(_message.Message):
    __slots__ = ("address", "executor_epoch", "cause", "requests", "last_step_id", "is_drained", "num_moved")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    address: str
    executor_epoch: int
    cause: str
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    last_step_id: int
    is_drained: bool
    num_moved: int
    def __init__(self, address: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., cause: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., last_step_id: _Optional[int] = ..., is_drained: bool = ..., num_moved: _Optional[int] = ...) -> None: ...

class WakeAt(_message.Message):
    __slots__ = ("at_ns",)
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    def __init__(self, at_ns: _Optional[int] = ...) -> None: ...

class RequestState(_message.Message):
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

class CoreConfig(_message.Message):
    __slots__ = ("block_size", "num_device_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_waiting", "vocab_size", "eos_token_ids", "features", "num_host_blocks", "block_bytes", "sliding_window", "max_adapters", "model_digest", "prefix_caching", "host_prefix_cache", "num_lookahead_slots", "preemption_mode", "batch_policy", "delay_factor", "queue_policy", "tenant_weights", "separates_tenants", "max_params_bytes", "max_run_ahead", "max_run_ahead_ms", "speculation", "max_draft_tokens", "num_adapter_slots", "max_encoder_tokens", "num_encoder_features", "vectors", "max_num_encoder_tokens", "step_time_ms", "target_itl_ms")
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
    NUM_ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODER_FEATURES_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_MS_FIELD_NUMBER: _ClassVar[int]
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
    num_adapter_slots: int
    max_encoder_tokens: int
    num_encoder_features: int
    vectors: JournaledVectorSizes
    max_num_encoder_tokens: int
    step_time_ms: int
    target_itl_ms: int
    def __init__(self, block_size: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_waiting: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[str]] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., sliding_window: _Optional[int] = ..., max_adapters: _Optional[int] = ..., model_digest: _Optional[str] = ..., prefix_caching: bool = ..., host_prefix_cache: bool = ..., num_lookahead_slots: _Optional[int] = ..., preemption_mode: _Optional[str] = ..., batch_policy: _Optional[str] = ..., delay_factor: _Optional[float] = ..., queue_policy: _Optional[str] = ..., tenant_weights: _Optional[_Mapping[str, float]] = ..., separates_tenants: bool = ..., max_params_bytes: _Optional[int] = ..., max_run_ahead: _Optional[int] = ..., max_run_ahead_ms: _Optional[int] = ..., speculation: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., num_adapter_slots: _Optional[int] = ..., max_encoder_tokens: _Optional[int] = ..., num_encoder_features: _Optional[int] = ..., vectors: _Optional[_Union[JournaledVectorSizes, _Mapping]] = ..., max_num_encoder_tokens: _Optional[int] = ..., step_time_ms: _Optional[int] = ..., target_itl_ms: _Optional[int] = ...) -> None: ...

class JournaledVectorSizes(_message.Message):
    __slots__ = ("embedding_size", "num_labels", "is_uncached")
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    IS_UNCACHED_FIELD_NUMBER: _ClassVar[int]
    embedding_size: int
    num_labels: int
    is_uncached: bool
    def __init__(self, embedding_size: _Optional[int] = ..., num_labels: _Optional[int] = ..., is_uncached: bool = ...) -> None: ...

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

class JournaledFeatures(_message.Message):
    __slots__ = ("data", "num_positions")
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    num_positions: int
    def __init__(self, data: _Optional[bytes] = ..., num_positions: _Optional[int] = ...) -> None: ...

class JournaledRequest(_message.Message):
    __slots__ = ("request_id", "params", "scheduling", "arrival", "client_key", "prompt_token_ids", "encoder_token_ids", "encoder_features", "sequences", "num_preemptions", "num_cached_tokens", "num_fruitless_losses", "num_tokens_at_loss", "num_prompt_logprobs_sent", "num_bypasses", "is_protected", "num_forks", "num_candidates", "search", "trial_size", "num_trials_left", "was_in_flight", "submitted_ns")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FEATURES_FIELD_NUMBER: _ClassVar[int]
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
    encoder_features: JournaledFeatures
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
    def __init__(self, request_id: _Optional[str] = ..., params: _Optional[_Union[JournaledSamplingParams, _Mapping]] = ..., scheduling: _Optional[_Union[JournaledSchedulingParams, _Mapping]] = ..., arrival: _Optional[int] = ..., client_key: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., encoder_token_ids: _Optional[bytes] = ..., encoder_features: _Optional[_Union[JournaledFeatures, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[JournaledSequence, _Mapping]]] = ..., num_preemptions: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_fruitless_losses: _Optional[int] = ..., num_tokens_at_loss: _Optional[int] = ..., num_prompt_logprobs_sent: _Optional[int] = ..., num_bypasses: _Optional[int] = ..., is_protected: bool = ..., num_forks: _Optional[int] = ..., num_candidates: _Optional[int] = ..., search: _Optional[_Union[JournaledBeamSearch, _Mapping]] = ..., trial_size: _Optional[int] = ..., num_trials_left: _Optional[int] = ..., was_in_flight: bool = ..., submitted_ns: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "num_logprobs", "num_prompt_logprobs", "n", "best_of", "beam", "allowed_token_ids", "bad_words_token_ids", "grammar", "transcription", "pooling")
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
    TRANSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
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
    transcription: _scheduler_pb2.TranscriptionRules
    pooling: JournaledPoolingParams
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam: _Optional[_Union[JournaledBeamParams, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[JournaledTokens, _Mapping]]] = ..., grammar: _Optional[_Union[_scheduler_pb2.Grammar, _Mapping]] = ..., transcription: _Optional[_Union[_scheduler_pb2.TranscriptionRules, _Mapping]] = ..., pooling: _Optional[_Union[JournaledPoolingParams, _Mapping]] = ...) -> None: ...

class JournaledPoolingParams(_message.Message):
    __slots__ = ("task", "num_dimensions", "raw", "second_text_start")
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    task: str
    num_dimensions: int
    raw: bool
    second_text_start: int
    def __init__(self, task: _Optional[str] = ..., num_dimensions: _Optional[int] = ..., raw: bool = ..., second_text_start: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("priority", "tenant", "deadline_ns", "adapter", "cache_salt", "uses_prefix_cache", "num_public_prefix_tokens", "target_itl_ms")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    USES_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    tenant: str
    deadline_ns: int
    adapter: str
    cache_salt: str
    uses_prefix_cache: bool
    num_public_prefix_tokens: int
    target_itl_ms: int
    def __init__(self, priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_ns: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., uses_prefix_cache: bool = ..., num_public_prefix_tokens: _Optional[int] = ..., target_itl_ms: _Optional[int] = ...) -> None: ...

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
