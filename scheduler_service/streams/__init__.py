"""Client streams: tokens and ends of requests on their way back to clients."""

from scheduler_service.streams.client_codec import (
    SamplingDecoder,
    check_names,
    decode_resumed,
    decode_sampling_params,
    decode_scheduling_params,
    decode_token_ids,
    encode_adapter,
    encode_default_sampling,
    encode_rejection,
)
from scheduler_service.streams.delivery import Delivery
from scheduler_service.streams.kept_outputs import (
    MAX_KEPT_S,
    Keeping,
    KeptOutputs,
    decode_keeping,
    digest_of_message,
)
from scheduler_service.streams.outbox import Outbox, UnreadLimits
from scheduler_service.streams.sinks import (
    GenerateStream,
    RequestSink,
    SessionStream,
    Sink,
    Stream,
    client_key,
)

__all__ = [
    "MAX_KEPT_S",
    "Delivery",
    "GenerateStream",
    "Keeping",
    "KeptOutputs",
    "Outbox",
    "RequestSink",
    "SamplingDecoder",
    "SessionStream",
    "Sink",
    "Stream",
    "UnreadLimits",
    "check_names",
    "client_key",
    "decode_keeping",
    "decode_resumed",
    "decode_sampling_params",
    "decode_scheduling_params",
    "decode_token_ids",
    "digest_of_message",
    "encode_adapter",
    "encode_default_sampling",
    "encode_rejection",
]
