from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBEDDING: _ClassVar[PoolingTask]
    POOLING_TASK_SCORES: _ClassVar[PoolingTask]

class BeamEarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BEAM_EARLY_STOPPING_UNSPECIFIED: _ClassVar[BeamEarlyStopping]
    BEAM_EARLY_STOPPING_HEURISTIC: _ClassVar[BeamEarlyStopping]
    BEAM_EARLY_STOPPING_ALWAYS: _ClassVar[BeamEarlyStopping]
    BEAM_EARLY_STOPPING_NEVER: _ClassVar[BeamEarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_MODEL_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Readiness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READINESS_UNSPECIFIED: _ClassVar[Readiness]
    READINESS_READY: _ClassVar[Readiness]
    READINESS_NO_EXECUTOR: _ClassVar[Readiness]
    READINESS_NO_PROGRESS: _ClassVar[Readiness]
    READINESS_DRAINING: _ClassVar[Readiness]
    READINESS_EXECUTORS_FAILING: _ClassVar[Readiness]
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBEDDING: PoolingTask
POOLING_TASK_SCORES: PoolingTask
BEAM_EARLY_STOPPING_UNSPECIFIED: BeamEarlyStopping
BEAM_EARLY_STOPPING_HEURISTIC: BeamEarlyStopping
BEAM_EARLY_STOPPING_ALWAYS: BeamEarlyStopping
BEAM_EARLY_STOPPING_NEVER: BeamEarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_MODEL_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_ERROR: FinishReason
READINESS_UNSPECIFIED: Readiness
READINESS_READY: Readiness
READINESS_NO_EXECUTOR: Readiness
READINESS_NO_PROGRESS: Readiness
READINESS_DRAINING: Readiness
READINESS_EXECUTORS_FAILING: Readiness

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "resume_token_ids", "sampling_params", "priority", "tenant", "deadline", "adapter", "cache_salt", "bypass_prefix_cache", "encoder_token_ids", "resume_sequences", "model_digest", "num_public_prefix_tokens", "traceparent", "tracestate", "encoder_features", "kept_output", "target_itl_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FEATURES_FIELD_NUMBER: _ClassVar[int]
    KEPT_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: SamplingParams
    priority: int
    tenant: str
    deadline: _duration_pb2.Duration
    adapter: str
    cache_salt: str
    bypass_prefix_cache: bool
    encoder_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_sequences: _containers.RepeatedCompositeFieldContainer[ResumedSequence]
    model_digest: str
    num_public_prefix_tokens: int
    traceparent: str
    tracestate: str
    encoder_features: bytes
    kept_output: KeptOutput
    target_itl_ms: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., bypass_prefix_cache: bool = ..., encoder_token_ids: _Optional[_Iterable[int]] = ..., resume_sequences: _Optional[_Iterable[_Union[ResumedSequence, _Mapping]]] = ..., model_digest: _Optional[str] = ..., num_public_prefix_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., encoder_features: _Optional[bytes] = ..., kept_output: _Optional[_Union[KeptOutput, _Mapping]] = ..., target_itl_ms: _Optional[int] = ...) -> None: ...

class KeptOutput(_message.Message):
    __slots__ = ("key", "duration", "resumes", "num_read_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: str
    duration: _duration_pb2.Duration
    resumes: bool
    num_read_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resumes: bool = ..., num_read_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class ResumedSequence(_message.Message):
    __slots__ = ("index", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "num_logprobs", "num_prompt_logprobs", "n", "best_of", "beam_search", "allowed_token_ids", "bad_words_token_ids", "grammar", "pooling", "transcription")
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
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
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
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    num_prompt_logprobs: int
    n: int
    best_of: int
    beam_search: BeamSearch
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    grammar: Grammar
    pooling: PoolingParams
    transcription: TranscriptionRules
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., transcription: _Optional[_Union[TranscriptionRules, _Mapping]] = ...) -> None: ...

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

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: BeamEarlyStopping
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[BeamEarlyStopping, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "tokens", "finish", "sequence_finish")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FINISH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: TokenChunk
    finish: Finish
    sequence_finish: SequenceFinish
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., sequence_finish: _Optional[_Union[SequenceFinish, _Mapping]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "index")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    index: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., index: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class SequenceFinish(_message.Message):
    __slots__ = ("index", "reason", "stop_token_id", "num_output_tokens", "cumulative_logprob", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: FinishReason
    stop_token_id: int
    num_output_tokens: int
    cumulative_logprob: float
    score: float
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., cumulative_logprob: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "usage", "error", "vector")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    usage: Usage
    error: RequestError
    vector: bytes
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., vector: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("reason", "message", "retry_delay", "schedulers")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_delay: _duration_pb2.Duration
    schedulers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., schedulers: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "abort", "submissions")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    submit: SessionSubmit
    abort: SessionAbort
    submissions: _containers.RepeatedCompositeFieldContainer[SessionSubmit]
    def __init__(self, submit: _Optional[_Union[SessionSubmit, _Mapping]] = ..., abort: _Optional[_Union[SessionAbort, _Mapping]] = ..., submissions: _Optional[_Iterable[_Union[SessionSubmit, _Mapping]]] = ...) -> None: ...

class SessionSubmit(_message.Message):
    __slots__ = ("handle", "request", "credential")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request: GenerateRequest
    credential: str
    def __init__(self, handle: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., credential: _Optional[str] = ...) -> None: ...

class SessionAbort(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("handles", "token_ids", "events", "takes_submissions")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    events: _containers.RepeatedCompositeFieldContainer[SessionEvent]
    takes_submissions: bool
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., events: _Optional[_Iterable[_Union[SessionEvent, _Mapping]]] = ..., takes_submissions: bool = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("handle", "tokens", "finish", "rejected", "sequence_finish")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FINISH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tokens: TokenChunk
    finish: Finish
    rejected: RequestError
    sequence_finish: SequenceFinish
    def __init__(self, handle: _Optional[int] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., rejected: _Optional[_Union[RequestError, _Mapping]] = ..., sequence_finish: _Optional[_Union[SequenceFinish, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "digest", "dtype", "vocab_size", "max_model_len_tokens", "eos_token_ids", "max_num_sequences", "max_message_bytes", "default_sampling_params", "readiness", "quantization", "encoder", "pooling", "max_kept_duration")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    MAX_KEPT_DURATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    dtype: str
    vocab_size: int
    max_model_len_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_num_sequences: int
    max_message_bytes: int
    default_sampling_params: SamplingParams
    readiness: Readiness
    quantization: str
    encoder: EncoderInfo
    pooling: PoolingInfo
    max_kept_duration: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_num_sequences: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., default_sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., readiness: _Optional[_Union[Readiness, str]] = ..., quantization: _Optional[str] = ..., encoder: _Optional[_Union[EncoderInfo, _Mapping]] = ..., pooling: _Optional[_Union[PoolingInfo, _Mapping]] = ..., max_kept_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PoolingInfo(_message.Message):
    __slots__ = ("embedding_size", "labels")
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    embedding_size: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, embedding_size: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

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

class IdentifyRequest(_message.Message):
    __slots__ = ("credential",)
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    credential: str
    def __init__(self, credential: _Optional[str] = ...) -> None: ...

class IdentifyResponse(_message.Message):
    __slots__ = ("knows_callers", "caller", "tenant", "scopes", "may_use_model")
    KNOWS_CALLERS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    MAY_USE_MODEL_FIELD_NUMBER: _ClassVar[int]
    knows_callers: bool
    caller: str
    tenant: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    may_use_model: bool
    def __init__(self, knows_callers: bool = ..., caller: _Optional[str] = ..., tenant: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., may_use_model: bool = ...) -> None: ...

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

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "path", "digest", "base_model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    base_model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., base_model: _Optional[str] = ...) -> None: ...
