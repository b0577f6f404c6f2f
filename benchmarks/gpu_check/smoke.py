"""What lets a part run on a CPU."""

from __future__ import annotations

import functools

from benchmarks.gpu_check.sizes import Sizes, smoke_sizes


@functools.cache
def prepare() -> Sizes:
    """Repairs Triton's interpreter, where there is one; once."""
    from splitserve_kernels.gpu.launch import why_unavailable

    if why_unavailable() is None:
        from tests.support.devices.interpreter import repair

        repair()
    return smoke_sizes()
