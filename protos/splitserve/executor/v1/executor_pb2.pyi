from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_LOGPROBS: _ClassVar[Feature]
    FEATURE_PROMPT_LOGPROBS: _ClassVar[Feature]
    FEATURE_PENALTIES: _ClassVar[Feature]
    FEATURE_LOGIT_BIAS: _ClassVar[Feature]
    FEATURE_ADAPTERS: _ClassVar[Feature]
    FEATURE_CROSS_ATTENTION: _ClassVar[Feature]
    FEATURE_TOKEN_CONSTRAINTS: _ClassVar[Feature]
    FEATURE_GRAMMAR: _ClassVar[Feature]
    FEATURE_SEVERAL_TOKENS: _ClassVar[Feature]
    FEATURE_POOLING: _ClassVar[Feature]
    FEATURE_PARTIAL_RESULTS: _ClassVar[Feature]

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBEDDING: _ClassVar[PoolingTask]
    POOLING_TASK_SCORES: _ClassVar[PoolingTask]

class StepStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATUS_UNSPECIFIED: _ClassVar[StepStatus]
    STEP_STATUS_OK: _ClassVar[StepStatus]
    STEP_STATUS_NEED_SNAPSHOT: _ClassVar[StepStatus]
    STEP_STATUS_REFUSED: _ClassVar[StepStatus]
    STEP_STATUS_FAILED: _ClassVar[StepStatus]
    STEP_STATUS_PARTIAL: _ClassVar[StepStatus]

class StepErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_ERROR_REASON_UNSPECIFIED: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_STALE_STEP: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_MALFORMED: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_BLOCK_OVERLAP: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_ROW_UNKNOWN: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_ROW_EXISTS: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_POSITION_OUT_OF_RANGE: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_LIMIT_EXCEEDED: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_FEATURE_UNSUPPORTED: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_OUT_OF_MEMORY: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_INTERNAL: _ClassVar[StepErrorReason]
    STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH: _ClassVar[StepErrorReason]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_OK: _ClassVar[RowStatus]
    ROW_STATUS_INVALID_LOGITS: _ClassVar[RowStatus]
    ROW_STATUS_INPUT_UNAVAILABLE: _ClassVar[RowStatus]
    ROW_STATUS_FAILED: _ClassVar[RowStatus]
    ROW_STATUS_NOT_SAMPLED: _ClassVar[RowStatus]
    ROW_STATUS_GRAMMAR_INVALID: _ClassVar[RowStatus]
FEATURE_UNSPECIFIED: Feature
FEATURE_LOGPROBS: Feature
FEATURE_PROMPT_LOGPROBS: Feature
FEATURE_PENALTIES: Feature
FEATURE_LOGIT_BIAS: Feature
FEATURE_ADAPTERS: Feature
FEATURE_CROSS_ATTENTION: Feature
FEATURE_TOKEN_CONSTRAINTS: Feature
FEATURE_GRAMMAR: Feature
FEATURE_SEVERAL_TOKENS: Feature
FEATURE_POOLING: Feature
FEATURE_PARTIAL_RESULTS: Feature
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBEDDING: PoolingTask
POOLING_TASK_SCORES: PoolingTask
STEP_STATUS_UNSPECIFIED: StepStatus
STEP_STATUS_OK: StepStatus
STEP_STATUS_NEED_SNAPSHOT: StepStatus
STEP_STATUS_REFUSED: StepStatus
STEP_STATUS_FAILED: StepStatus
STEP_STATUS_PARTIAL: StepStatus
STEP_ERROR_REASON_UNSPECIFIED: StepErrorReason
STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH: StepErrorReason
STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH: StepErrorReason
STEP_ERROR_REASON_STALE_STEP: StepErrorReason
STEP_ERROR_REASON_MALFORMED: StepErrorReason
STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE: StepErrorReason
STEP_ERROR_REASON_BLOCK_OVERLAP: StepErrorReason
STEP_ERROR_REASON_ROW_UNKNOWN: StepErrorReason
STEP_ERROR_REASON_ROW_EXISTS: StepErrorReason
STEP_ERROR_REASON_POSITION_OUT_OF_RANGE: StepErrorReason
STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE: StepErrorReason
STEP_ERROR_REASON_LIMIT_EXCEEDED: StepErrorReason
STEP_ERROR_REASON_FEATURE_UNSUPPORTED: StepErrorReason
STEP_ERROR_REASON_OUT_OF_MEMORY: StepErrorReason
STEP_ERROR_REASON_INTERNAL: StepErrorReason
STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH: StepErrorReason
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_OK: RowStatus
ROW_STATUS_INVALID_LOGITS: RowStatus
ROW_STATUS_INPUT_UNAVAILABLE: RowStatus
ROW_STATUS_FAILED: RowStatus
ROW_STATUS_NOT_SAMPLED: RowStatus
ROW_STATUS_GRAMMAR_INVALID: RowStatus

class LoadAdapterRequest(_message.Message):
    __slots__ = ("scheduler_epoch", "executor_epoch", "adapter", "kept_adapters")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KEPT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    executor_epoch: int
    adapter: AdapterSource
    kept_adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scheduler_epoch: _Optional[int] = ..., executor_epoch: _Optional[int] = ..., adapter: _Optional[_Union[AdapterSource, _Mapping]] = ..., kept_adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterSource(_message.Message):
    __slots__ = ("name", "digest", "path", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("executor", "draining", "drained")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    executor: ExecutorInfo
    draining: bool
    drained: bool
    def __init__(self, executor: _Optional[_Union[ExecutorInfo, _Mapping]] = ..., draining: bool = ..., drained: bool = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ContractVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class ExecutorInfo(_message.Message):
    __slots__ = ("contract_version", "executor_epoch", "address", "model", "block_size_tokens", "num_device_blocks", "num_host_blocks", "block_bytes", "limits", "features", "software_version", "newest_scheduler_epoch", "step_running_ms", "trial_step", "sampling_version", "compute", "slow_compute_reason", "answers_while_computing", "adapter_support")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_RUNNING_MS_FIELD_NUMBER: _ClassVar[int]
    TRIAL_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    SLOW_COMPUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_WHILE_COMPUTING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    contract_version: ContractVersion
    executor_epoch: int
    address: str
    model: ModelInfo
    block_size_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    limits: ExecutorLimits
    features: _containers.RepeatedScalarFieldContainer[Feature]
    software_version: str
    newest_scheduler_epoch: int
    step_running_ms: int
    trial_step: TrialStep
    sampling_version: int
    compute: str
    slow_compute_reason: str
    answers_while_computing: bool
    adapter_support: AdapterSupport
    def __init__(self, contract_version: _Optional[_Union[ContractVersion, _Mapping]] = ..., executor_epoch: _Optional[int] = ..., address: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., block_size_tokens: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., limits: _Optional[_Union[ExecutorLimits, _Mapping]] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ..., software_version: _Optional[str] = ..., newest_scheduler_epoch: _Optional[int] = ..., step_running_ms: _Optional[int] = ..., trial_step: _Optional[_Union[TrialStep, _Mapping]] = ..., sampling_version: _Optional[int] = ..., compute: _Optional[str] = ..., slow_compute_reason: _Optional[str] = ..., answers_while_computing: bool = ..., adapter_support: _Optional[_Union[AdapterSupport, _Mapping]] = ...) -> None: ...

class AdapterSupport(_message.Message):
    __slots__ = ("max_num_loaded", "max_rank", "target_modules")
    MAX_NUM_LOADED_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    max_num_loaded: int
    max_rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_num_loaded: _Optional[int] = ..., max_rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class TrialStep(_message.Message):
    __slots__ = ("num_tokens", "num_attended", "took_us")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    TOOK_US_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_attended: int
    took_us: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_attended: _Optional[int] = ..., took_us: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "digest", "dtype", "kv_cache_dtype", "vocab_size", "max_model_len_tokens", "eos_token_ids", "sliding_window_tokens", "default_sampling_params", "quantization", "encoder", "pooling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    max_model_len_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sliding_window_tokens: int
    default_sampling_params: SamplingParams
    quantization: str
    encoder: EncoderInfo
    pooling: PoolingInfo
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., sliding_window_tokens: _Optional[int] = ..., default_sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., quantization: _Optional[str] = ..., encoder: _Optional[_Union[EncoderInfo, _Mapping]] = ..., pooling: _Optional[_Union[PoolingInfo, _Mapping]] = ...) -> None: ...

class PoolingInfo(_message.Message):
    __slots__ = ("embedding_size", "labels", "uncached")
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    embedding_size: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    uncached: bool
    def __init__(self, embedding_size: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., uncached: bool = ...) -> None: ...

class EncoderInfo(_message.Message):
    __slots__ = ("max_tokens", "decoder_token_ids", "audio")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    decoder_token_ids: _containers.RepeatedScalarFieldContainer[int]
    audio: AudioInfo
    def __init__(self, max_tokens: _Optional[int] = ..., decoder_token_ids: _Optional[_Iterable[int]] = ..., audio: _Optional[_Union[AudioInfo, _Mapping]] = ...) -> None: ...

class AudioInfo(_message.Message):
    __slots__ = ("num_mel_bins", "num_frames", "num_positions", "sampling_rate", "hop_length", "fft_length")
    NUM_MEL_BINS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    HOP_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    num_mel_bins: int
    num_frames: int
    num_positions: int
    sampling_rate: int
    hop_length: int
    fft_length: int
    def __init__(self, num_mel_bins: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_positions: _Optional[int] = ..., sampling_rate: _Optional[int] = ..., hop_length: _Optional[int] = ..., fft_length: _Optional[int] = ...) -> None: ...

class ExecutorLimits(_message.Message):
    __slots__ = ("max_num_rows", "max_num_batched_tokens", "max_message_bytes", "max_inflight_steps", "max_adapters_per_step")
    MAX_NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    max_num_rows: int
    max_num_batched_tokens: int
    max_message_bytes: int
    max_inflight_steps: int
    max_adapters_per_step: int
    def __init__(self, max_num_rows: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_inflight_steps: _Optional[int] = ..., max_adapters_per_step: _Optional[int] = ...) -> None: ...

class ScheduleBatch(_message.Message):
    __slots__ = ("scheduler_epoch", "executor_epoch", "step_id", "base_step_id", "removed_row_ids", "new_rows", "table_writes", "swap_out", "swap_in", "copy", "work")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_WRITES_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    base_step_id: int
    removed_row_ids: bytes
    new_rows: NewRows
    table_writes: TableWrites
    swap_out: BlockMoves
    swap_in: BlockMoves
    copy: BlockMoves
    work: Work
    def __init__(self, scheduler_epoch: _Optional[int] = ..., executor_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., base_step_id: _Optional[int] = ..., removed_row_ids: _Optional[bytes] = ..., new_rows: _Optional[_Union[NewRows, _Mapping]] = ..., table_writes: _Optional[_Union[TableWrites, _Mapping]] = ..., swap_out: _Optional[_Union[BlockMoves, _Mapping]] = ..., swap_in: _Optional[_Union[BlockMoves, _Mapping]] = ..., copy: _Optional[_Union[BlockMoves, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ...) -> None: ...

class BlockMoves(_message.Message):
    __slots__ = ("source_block_ids", "destination_block_ids")
    SOURCE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    source_block_ids: bytes
    destination_block_ids: bytes
    def __init__(self, source_block_ids: _Optional[bytes] = ..., destination_block_ids: _Optional[bytes] = ...) -> None: ...

class NewRows(_message.Message):
    __slots__ = ("row_ids", "sampling_params_indexes", "seeds", "num_prompt_tokens", "block_offsets", "block_ids", "history_offsets", "history_token_ids", "sampling_params", "adapter_indexes", "adapters", "cross_block_offsets", "cross_block_ids", "encoder_offsets", "encoder_token_ids", "num_encoder_tokens", "encoder_feature_offsets", "encoder_features")
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_INDEXES_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CROSS_BLOCK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CROSS_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FEATURE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FEATURES_FIELD_NUMBER: _ClassVar[int]
    row_ids: bytes
    sampling_params_indexes: bytes
    seeds: bytes
    num_prompt_tokens: bytes
    block_offsets: bytes
    block_ids: bytes
    history_offsets: bytes
    history_token_ids: bytes
    sampling_params: _containers.RepeatedCompositeFieldContainer[SamplingParams]
    adapter_indexes: bytes
    adapters: _containers.RepeatedScalarFieldContainer[str]
    cross_block_offsets: bytes
    cross_block_ids: bytes
    encoder_offsets: bytes
    encoder_token_ids: bytes
    num_encoder_tokens: bytes
    encoder_feature_offsets: bytes
    encoder_features: bytes
    def __init__(self, row_ids: _Optional[bytes] = ..., sampling_params_indexes: _Optional[bytes] = ..., seeds: _Optional[bytes] = ..., num_prompt_tokens: _Optional[bytes] = ..., block_offsets: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., history_offsets: _Optional[bytes] = ..., history_token_ids: _Optional[bytes] = ..., sampling_params: _Optional[_Iterable[_Union[SamplingParams, _Mapping]]] = ..., adapter_indexes: _Optional[bytes] = ..., adapters: _Optional[_Iterable[str]] = ..., cross_block_offsets: _Optional[bytes] = ..., cross_block_ids: _Optional[bytes] = ..., encoder_offsets: _Optional[bytes] = ..., encoder_token_ids: _Optional[bytes] = ..., num_encoder_tokens: _Optional[bytes] = ..., encoder_feature_offsets: _Optional[bytes] = ..., encoder_features: _Optional[bytes] = ...) -> None: ...

class TableWrites(_message.Message):
    __slots__ = ("row_ids", "start_indexes", "block_offsets", "block_ids")
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    START_INDEXES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    row_ids: bytes
    start_indexes: bytes
    block_offsets: bytes
    block_ids: bytes
    def __init__(self, row_ids: _Optional[bytes] = ..., start_indexes: _Optional[bytes] = ..., block_offsets: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("row_ids", "num_computed_tokens", "num_new_tokens", "sampled_steps_back", "token_ids", "samples", "num_run_on_tokens", "draft_offsets", "draft_token_ids", "reports_parts")
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_STEPS_BACK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUN_ON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_PARTS_FIELD_NUMBER: _ClassVar[int]
    row_ids: bytes
    num_computed_tokens: bytes
    num_new_tokens: bytes
    sampled_steps_back: bytes
    token_ids: bytes
    samples: bytes
    num_run_on_tokens: bytes
    draft_offsets: bytes
    draft_token_ids: bytes
    reports_parts: bool
    def __init__(self, row_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., num_new_tokens: _Optional[bytes] = ..., sampled_steps_back: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., num_run_on_tokens: _Optional[bytes] = ..., draft_offsets: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., reports_parts: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "suppressed_token_ids", "num_logprobs", "num_prompt_logprobs", "allowed_token_ids", "bad_words_token_ids", "grammar", "stop_token_ids", "pooling", "transcription")
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
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    num_prompt_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    grammar: Grammar
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: PoolingParams
    transcription: TranscriptionRules
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., transcription: _Optional[_Union[TranscriptionRules, _Mapping]] = ...) -> None: ...

class TranscriptionRules(_message.Message):
    __slots__ = ("first_suppressed_token_ids", "first_timestamp_token_id", "first_special_token_id", "max_first_timestamp")
    FIRST_SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIMESTAMP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_SPECIAL_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_FIRST_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    first_suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_timestamp_token_id: int
    first_special_token_id: int
    max_first_timestamp: int
    def __init__(self, first_suppressed_token_ids: _Optional[_Iterable[int]] = ..., first_timestamp_token_id: _Optional[int] = ..., first_special_token_id: _Optional[int] = ..., max_first_timestamp: _Optional[int] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "num_dimensions", "raw", "second_text_start")
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    task: PoolingTask
    num_dimensions: int
    raw: bool
    second_text_start: int
    def __init__(self, task: _Optional[_Union[PoolingTask, str]] = ..., num_dimensions: _Optional[int] = ..., raw: bool = ..., second_text_start: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("reason", "field", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: StepErrorReason
    field: str
    message: str
    def __init__(self, reason: _Optional[_Union[StepErrorReason, str]] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("scheduler_epoch", "executor_epoch", "step_id", "status", "error", "row_statuses", "sampled_token_ids", "row_errors", "logprobs", "prompt_logprobs", "timings", "sampled_offsets", "vector_offsets", "vectors")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ROW_STATUSES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    status: StepStatus
    error: StepError
    row_statuses: bytes
    sampled_token_ids: bytes
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    timings: StepTimings
    sampled_offsets: bytes
    vector_offsets: bytes
    vectors: bytes
    def __init__(self, scheduler_epoch: _Optional[int] = ..., executor_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., status: _Optional[_Union[StepStatus, str]] = ..., error: _Optional[_Union[StepError, _Mapping]] = ..., row_statuses: _Optional[bytes] = ..., sampled_token_ids: _Optional[bytes] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., sampled_offsets: _Optional[bytes] = ..., vector_offsets: _Optional[bytes] = ..., vectors: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row_index", "message")
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row_index: int
    message: str
    def __init__(self, row_index: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("row_indexes", "positions", "token_ids", "logprobs", "ranks", "top_offsets", "top_token_ids", "top_logprobs")
    ROW_INDEXES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row_indexes: bytes
    positions: bytes
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_offsets: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, row_indexes: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_offsets: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_us", "move_us", "forward_us", "sample_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    MOVE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    move_us: int
    forward_us: int
    sample_us: int
    def __init__(self, queue_us: _Optional[int] = ..., move_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...
