"""Decoders that replace the `transformers` code of known models, with matrices joined or packed."""

from executor_service.decoders.cpu_decoder import (
    NativeModel,
    NativePagedModel,
    build_native_model,
    why_not_native,
)
from executor_service.decoders.gpu_linears import (
    GpuLinears,
    GpuQuantizedLinear,
    pack_linears_on_gpu,
)
from executor_service.decoders.llama_config import (
    release_weights,
    rotation,
    rotation_at,
    take_layers,
    unknown_fields,
    why_not_llama,
    why_not_llama_config,
    why_not_llama_settings,
)
from executor_service.decoders.packed_linears import (
    PackedEmbeddingModule,
    PackedLinearModule,
    pack_linears,
)
from executor_service.decoders.plain_parts import PlainModel, PlainRotary

__all__ = [
    "GpuLinears",
    "GpuQuantizedLinear",
    "NativeModel",
    "NativePagedModel",
    "PackedEmbeddingModule",
    "PackedLinearModule",
    "PlainModel",
    "PlainRotary",
    "build_native_model",
    "pack_linears",
    "pack_linears_on_gpu",
    "release_weights",
    "rotation",
    "rotation_at",
    "take_layers",
    "unknown_fields",
    "why_not_llama",
    "why_not_llama_config",
    "why_not_llama_settings",
    "why_not_native",
]
