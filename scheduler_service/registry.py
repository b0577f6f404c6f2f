"""Registration of executors: what does not fit is refused here, by name, not at the first step."""

from __future__ import annotations

import grpc.aio

from scheduler_service.cluster import Cluster
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_rpc.domain_error import DomainError

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 0

_AT_LEAST_ONE = (
    "executor_epoch",
    "block_size_tokens",
    "num_device_blocks",
    "model.vocab_size",
    "model.max_model_len_tokens",
    "limits.max_num_rows",
    "limits.max_num_batched_tokens",
    "limits.max_message_bytes",
    "limits.max_inflight_steps",
)
_REQUIRED_TEXT = ("address", "model.digest", "model.dtype")


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Register."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        """Takes an executor into the cluster, or refuses it."""
        info = request.executor
        check_executor_info(info, self._cluster.model)
        self._cluster.check_not_draining()
        self._cluster.join(info)
        return registry_pb2.RegisterResponse(
            scheduler_epoch=self._cluster.scheduler_epoch,
            contract_version=executor.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR),
        )


def check_executor_info(info: executor.ExecutorInfo, model: executor.ModelInfo | None) -> None:
    """Raises DomainError naming field and values; `model` is what the others serve, if any."""
    major = info.contract_version.major
    if major != CONTRACT_MAJOR:
        raise DomainError(
            "CONTRACT_VERSION_MISMATCH",
            f"contract_version.major is {major}; this scheduler speaks {CONTRACT_MAJOR}",
        )
    for path in _AT_LEAST_ONE:
        if (value := _get(info, path)) < 1:
            raise DomainError("EXECUTOR_INFO_INVALID", f"{path} is {value}; allowed: 1 or more")
    if info.num_host_blocks < 0:
        raise DomainError(
            "EXECUTOR_INFO_INVALID",
            f"num_host_blocks is {info.num_host_blocks}; allowed: 0 or more",
        )
    for path in _REQUIRED_TEXT:
        if not _get(info, path):
            raise DomainError("EXECUTOR_INFO_INVALID", f"{path} is empty; it is required")
    for path in ("digest", "dtype"):
        if model is not None and getattr(model, path) != getattr(info.model, path):
            raise DomainError(
                "MODEL_MISMATCH",
                f"model.{path} is {getattr(info.model, path)!r}; the executors here serve "
                f"{getattr(model, path)!r}",
            )


def _get(info: executor.ExecutorInfo, path: str) -> int:
    value = info
    for name in path.split("."):
        value = getattr(value, name)
    return value  # type: ignore[return-value]
