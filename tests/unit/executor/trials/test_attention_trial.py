from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from executor_service.device import LayerShape
from executor_service.errors import TrialFailed
from executor_service.model import LayerKind
from executor_service.trials import try_layer
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    UNIT_SCALES,
    AttentionOptions,
    KVScales,
    PagedBatch,
)

CPU = torch.device("cpu")
LAYER = LayerShape(num_kv_heads=2, key_dim=16, value_dim=24)
NUM_HEADS = 6
OPTIONS = AttentionOptions(
    scale=0.25, sliding_window=12, softcap=5.0, sinks=torch.linspace(-1, 2, NUM_HEADS)
)
FAULTS = (
    "offset",
    "nan",
    "no_window",
    "no_softcap",
    "no_sinks",
    "scale",
    "late_write",
    "last_row",
    "heads",
)
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Faulty:
    """The oracle, but for `fault`."""

    fault: str

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        if self.fault == "no_scales":
            scales = UNIT_SCALES
        if self.fault == "late_write":
            batch = replace(batch, slot_mapping=batch.slot_mapping.flip(0))
        if self.fault == "cut_off":
            # Rounds all numbers towards zero.
            key, value = ((x.float() * (1 - 2**-4)).to(x.dtype) for x in (key, value))
        reference.write_kv(key, value, key_pool, value_pool, batch, scales)

    def paged_attention(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        if self.fault == "no_window":
            options = replace(options, sliding_window=None)
        if self.fault == "no_softcap":
            options = replace(options, softcap=None)
        if self.fault == "no_sinks":
            options = replace(options, sinks=None)
        if self.fault == "scale":
            options = replace(options, scale=options.scale * 1.1)
        if self.fault == "heads":
            query = query.roll(1, dims=1)
        if self.fault == "rounded_queries":
            query = query.to(FLOAT8).to(query.dtype)
        output = reference.paged_attention(query, key_pool, value_pool, batch, options, scales)
        if self.fault == "offset":
            output = output + 0.1
        if self.fault in ("nan", "last_row"):
            output[-1, -1, -1] = torch.nan if self.fault == "nan" else 2.0
        return output


FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
KIND = LayerKind(LAYER, NUM_HEADS, OPTIONS)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("sliding_window", [None, 12, 100_000])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_try_layer_passes_when_the_backend_is_right(
    block_size: int, sliding_window: int | None, dtype: torch.dtype
) -> None:
    kind = replace(KIND, options=replace(OPTIONS, sliding_window=sliding_window))
    try_layer(Faulty("none"), kind, block_size, dtype, CPU)


@pytest.mark.parametrize(
    ("fault", "dtype", "rounds_queries"),
    [
        ("none", FLOAT32, False),
        ("none", BFLOAT16, False),
        ("rounded_queries", FLOAT16, True),
        ("rounded_queries", BFLOAT16, True),
    ],
)
def test_try_layer_passes_when_pools_are_float8(
    fault: str, dtype: torch.dtype, rounds_queries: bool
) -> None:
    try_layer(Faulty(fault), KIND, 16, dtype, CPU, FLOAT8, rounds_queries=rounds_queries)


@pytest.mark.parametrize(
    ("fault", "dtype", "kv_dtype", "rounds_queries"),
    [
        *((f, d, kv, False) for f in FAULTS for d in (FLOAT32, BFLOAT16) for kv in (None, FLOAT8)),
        *((f, BFLOAT16, FLOAT8, False) for f in ("cut_off", "no_scales", "rounded_queries")),
        ("rounded_queries", FLOAT16, FLOAT8, False),
        *((f, BFLOAT16, FLOAT8, True) for f in (*FAULTS, "no_scales")),
    ],
)
def test_try_layer_raises_when_the_backend_is_wrong(
    fault: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, rounds_queries: bool
) -> None:
    said = f"differs by .* allowed .* in {dtype} over {kv_dtype or dtype}"
    with pytest.raises(TrialFailed, match=said):
        try_layer(Faulty(fault), KIND, 16, dtype, CPU, kv_dtype, rounds_queries=rounds_queries)
