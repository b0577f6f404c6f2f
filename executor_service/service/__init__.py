"""gRPC service of the executor: decoding of batches, the step worker, answers. No torch."""

from executor_service.service.adapter_loading import AdapterLoading
from executor_service.service.answer_encoding import encode_answer, encode_info, encode_part
from executor_service.service.batch_decoding import decode_batch
from executor_service.service.departure import Departures, ExecutorLives
from executor_service.service.membership import Membership
from executor_service.service.part_reports import LEAST_INTERVAL_S, PartReports
from executor_service.service.registration import (
    REGISTRY_SERVICE,
    UNREACHABLE,
    GrpcRegistry,
    Pacing,
    Registrar,
    RegistrationFailed,
    StabilityDetector,
    advertised_address,
    ranked,
)
from executor_service.service.servicer import (
    SERVICE,
    ExecuteStreams,
    ExecutorServicer,
    ReadyExecutor,
)
from executor_service.service.step_worker import Encode, StepWorker

__all__ = [
    "LEAST_INTERVAL_S",
    "REGISTRY_SERVICE",
    "SERVICE",
    "UNREACHABLE",
    "AdapterLoading",
    "Departures",
    "Encode",
    "ExecuteStreams",
    "ExecutorLives",
    "ExecutorServicer",
    "GrpcRegistry",
    "Membership",
    "Pacing",
    "PartReports",
    "ReadyExecutor",
    "Registrar",
    "RegistrationFailed",
    "StabilityDetector",
    "StepWorker",
    "advertised_address",
    "decode_batch",
    "encode_answer",
    "encode_info",
    "encode_part",
    "ranked",
]
