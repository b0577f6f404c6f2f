"""SiLU times what it gates, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.layer_ops import gated_product

# The last bit of each dtype, twice: exp is approximated, and there are two roundings.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 97), (2, 1024), (2, 2500)])
def test_gated_product_says_what_torch_says_when_widths_are_odd(
    num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = 4 * torch.randn(num_tokens, 2 * width, generator=generator)
    gate_up = numbers.to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    product = gated_product(gate_up)
    assert product.dtype == dtype
    expected = functional.silu(gate) * up
    torch.testing.assert_close(product, expected, rtol=TOLERANCES[dtype], atol=1e-6)


def test_gated_product_is_zero_when_the_gate_is_far_below(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 3.0, 3.0, 3.0]], device=device)
    assert gated_product(gate_up).tolist() == [[0.0, 0.0, 600.0]]


def test_gated_product_returns_nothing_when_there_are_no_tokens(device: torch.device) -> None:
    assert gated_product(torch.empty(0, 8, device=device)).shape == (0, 4)
