"""Native kernels for the CPU: attention, matrix products, and a whole decoder."""

from splitserve_kernels.cpu.decoder import DecoderPools, NativeDecoder, RevealedStates, RunInput
from splitserve_kernels.cpu.group_weights import GroupPart, pack_groups
from splitserve_kernels.cpu.library import (
    DTYPES,
    STEP_PARTS,
    NativeLibrary,
    _torch_openmp,
    load_library,
)
from splitserve_kernels.cpu.low_rank import (
    NativeAdapter,
    StepAdapters,
    linear_adapted,
    pack_update,
)
from splitserve_kernels.cpu.operations import (
    NativeAttention,
    PackedLinear,
    WeightRows,
    linear,
    pack,
    unpack_outputs,
    why_not_native_attention,
)
from splitserve_kernels.cpu.sampling import choose_tokens

__all__ = [
    "DTYPES",
    "STEP_PARTS",
    "DecoderPools",
    "GroupPart",
    "NativeAdapter",
    "NativeAttention",
    "NativeDecoder",
    "NativeLibrary",
    "PackedLinear",
    "RevealedStates",
    "RunInput",
    "StepAdapters",
    "WeightRows",
    "_torch_openmp",
    "choose_tokens",
    "linear",
    "linear_adapted",
    "load_library",
    "pack",
    "pack_groups",
    "pack_update",
    "unpack_outputs",
    "why_not_native_attention",
]
