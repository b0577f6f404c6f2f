"""Registration of executors: what does not fit is refused here, by name, not at the first step."""

from __future__ import annotations

import re
from functools import reduce
from types import MappingProxyType
from typing import Any

import grpc.aio

from scheduler_service.cluster import Cluster
from scheduler_service.core_config import MIN_MESSAGE_BYTES
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_rpc.domain_error import DomainError

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 2

_LEAST = MappingProxyType(
    {
        "executor_epoch": 1,
        "block_size_tokens": 1,
        "num_device_blocks": 1,
        "num_host_blocks": 0,
        "block_bytes": 0,
        "model.vocab_size": 1,
        "model.max_model_len_tokens": 2,
        "limits.max_num_rows": 1,
        "limits.max_num_batched_tokens": 1,
        "limits.max_message_bytes": MIN_MESSAGE_BYTES,
        "limits.max_inflight_steps": 1,
    }
)
_DTYPES = "float32|bfloat16|float16"
_KV_DTYPES = f"{_DTYPES}|float8_e4m3fn"
_TEXTS = MappingProxyType(
    {
        "address": (r".+:[0-9]{1,5}", "host:port"),
        "model.name": (r"(?s).+", "a text that is not empty"),
        "model.digest": (r"[0-9a-f]{64}", "64 lower-case hexadecimal digits"),
        "model.dtype": (_DTYPES, _DTYPES),
        "model.kv_cache_dtype": (_KV_DTYPES, _KV_DTYPES),
    }
)


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
    for path, least in _LEAST.items():
        if (number := _get(info, path)) < least:
            raise _invalid(path, number, f"{least} or more")
    for path, (pattern, allowed) in _TEXTS.items():
        if not re.fullmatch(pattern, text := _get(info, path)):
            raise _invalid(path, text, allowed)
    for token_id in info.model.eos_token_ids:
        if not 0 <= token_id < info.model.vocab_size:
            raise _invalid("model.eos_token_ids", token_id, f"0 to {info.model.vocab_size - 1}")
    _check_optional(info)
    for path in ("digest", "dtype", "kv_cache_dtype"):
        if model is not None and getattr(model, path) != getattr(info.model, path):
            raise DomainError(
                "MODEL_MISMATCH",
                f"model.{path} is {getattr(info.model, path)!r}; the executors here serve "
                f"{getattr(model, path)!r}",
            )


def _check_optional(info: executor.ExecutorInfo) -> None:
    """Fields that are present exactly if something else is so."""
    window = info.model.sliding_window_tokens
    if info.model.HasField("sliding_window_tokens") and window < 1:
        raise _invalid("model.sliding_window_tokens", window, "1 or more, or absent")
    most = info.limits.max_adapters_per_step
    if (executor.FEATURE_ADAPTERS in info.features) != (most >= 1):
        allowed = "1 or more with FEATURE_ADAPTERS, absent without"
        raise _invalid("limits.max_adapters_per_step", most, allowed)


def _invalid(path: str, value: object, allowed: str) -> DomainError:
    return DomainError("EXECUTOR_INFO_INVALID", f"{path} is {value!r}; allowed: {allowed}")


def _get(info: executor.ExecutorInfo, path: str) -> Any:  # noqa: ANN401
    return reduce(getattr, path.split("."), info)
