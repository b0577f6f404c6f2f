"""Quantised checkpoints: each format becomes `PackedWeight`s, without loss."""

from executor_service.quantization.bitsandbytes import BitsAndBytes
from executor_service.quantization.codes import (
    centred_values,
    float8_values,
    planes_of_codes,
    signed_values,
)
from executor_service.quantization.compressed_tensors import CompressedTensors
from executor_service.quantization.declaration import declared_format
from executor_service.quantization.float8 import Float8
from executor_service.quantization.gguf_blocks import BLOCK_TYPES, pack_blocks
from executor_service.quantization.gguf_file import (
    GgufFile,
    GgufTensor,
    gguf_header_bytes,
    parse_gguf,
    read_gguf,
)
from executor_service.quantization.gguf_model import (
    GgufLayer,
    gguf_config,
    gguf_layer,
    gguf_weights,
    order_of_pairs,
)
from executor_service.quantization.gptq import Awq, Gptq
from executor_service.quantization.mxfp4 import Mxfp4
from executor_service.quantization.rounding import (
    GROUP_SIZE,
    ROUNDINGS,
    Rounding,
    round_to_4_bits,
    round_to_8_bits,
    round_to_float8,
)
from executor_service.quantization.tensor_files import (
    LazyTensor,
    lazy_plain_weights,
    lazy_weights,
)
from executor_service.quantization.weight_format import WeightFormat

__all__ = [
    "BLOCK_TYPES",
    "GROUP_SIZE",
    "ROUNDINGS",
    "Awq",
    "BitsAndBytes",
    "CompressedTensors",
    "Float8",
    "GgufFile",
    "GgufLayer",
    "GgufTensor",
    "Gptq",
    "LazyTensor",
    "Mxfp4",
    "Rounding",
    "WeightFormat",
    "centred_values",
    "declared_format",
    "float8_values",
    "gguf_config",
    "gguf_header_bytes",
    "gguf_layer",
    "gguf_weights",
    "lazy_plain_weights",
    "lazy_weights",
    "order_of_pairs",
    "pack_blocks",
    "parse_gguf",
    "planes_of_codes",
    "read_gguf",
    "round_to_4_bits",
    "round_to_8_bits",
    "round_to_float8",
    "signed_values",
]
