"""What is on this machine, and how fast it is: what other figures are compared with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.backends import why_absent
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import PACKAGES, TOOLS, package_version, rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes

_COMPILERS = ("cc", "gcc")


def cases(sizes: Sizes) -> Iterator[Case]:
    """Short; the rest means little without it."""
    yield Case("packages", 1, _packages)
    yield Case("tools", 1, _tools)
    yield Case("device", 5, partial(_device, sizes))
    yield Case("backends", 1, _backends)


def _packages() -> Iterator[Measurement]:
    for group, names in PACKAGES.items():
        missing = [name for name in names if package_version(name) is None]
        found = "complete" if not missing else f"without {', '.join(missing)}"
        # Everything stands on these; the others cost the parts that they are for.
        is_met = not missing if group == "kernels" else None
        note = ", ".join(f"{name} {package_version(name)}" for name in names if name not in missing)
        yield Measurement(f"packages for {group}", found, is_met=is_met, note=note)


def _tools() -> Iterator[Measurement]:
    found = {name: shutil.which(name) for name in TOOLS}
    note = ", ".join(f"{name} {path or 'missing'}" for name, path in found.items())
    has_compiler = any(found[name] for name in _COMPILERS) or "CC" in os.environ
    yield Measurement("a C compiler, for Triton", str(has_compiler), is_met=has_compiler, note=note)


def _device(sizes: Sizes) -> Iterator[Measurement]:
    if sizes.device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        found = torch.cuda.get_device_properties(sizes.device)
        free, total = torch.cuda.mem_get_info(sizes.device)
        note = (
            f"{found.multi_processor_count} multiprocessors, {found.major}.{found.minor},"
            f" {found.L2_cache_size >> 20} MiB of L2, {free >> 20} of {total >> 20} MiB free,"
            f" cudnn {cudnn.version()}"
        )
        yield Measurement("device", found.name, note=note)
        yield from _kernel(sizes)
    rates = rates_of(sizes)
    yield Measurement("a copy, read and written", rates.bandwidth / 1e9, "GB/s")
    yield Measurement(f"a product of {sizes.matrix_size}", rates.flops / 1e12, "TFLOP/s")


def _kernel(sizes: Sizes) -> Iterator[Measurement]:
    """That kernels compiled on this machine run at all."""
    from splitserve_kernels.gpu.layer_ops import gated_product

    ones = torch.ones(4, 256, dtype=torch.bfloat16, device=sizes.device)
    expected = torch.nn.functional.silu(ones[:, :128])
    error = float((gated_product(ones).float() - expected.float()).abs().max())
    is_met = error < 1e-2
    yield Measurement("a kernel of Triton, compiled here", error, "error", is_met=is_met)


def _backends() -> Iterator[Measurement]:
    for name, reason in why_absent().items():
        yield Measurement(f"{name} is not measured", "absent", note=reason)
