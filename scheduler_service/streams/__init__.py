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
    "Delivery",
    "GenerateStream",
    "Outbox",
    "RequestSink",
    "SamplingDecoder",
    "SessionStream",
    "Sink",
    "Stream",
    "UnreadLimits",
    "check_names",
    "client_key",
    "decode_resumed",
    "decode_sampling_params",
    "decode_scheduling_params",
    "decode_token_ids",
    "encode_adapter",
    "encode_default_sampling",
    "encode_rejection",
]
