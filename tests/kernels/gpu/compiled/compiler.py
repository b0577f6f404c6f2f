"""Compiles what launchers launch to the machine code of a GPU that need not be here.

Run as a program, without TRITON_INTERPRET: `python -m tests.kernels.gpu.compiled.compiler 90`
compiles all cases for compute capability 9.0, `.. 90 copies samples` those two. Prints a line of
JSON for each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.compiled.cases import CASES
from tests.kernels.gpu.compiled.resources import Resources

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)")
_TRAP = re.compile(r"^\s*trap;", re.MULTILINE)
_LOADS_AHEAD = re.compile(r"async_wait.*num = (\d+)")


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead_of_launching(capability: int) -> list[Resources]:
    """From now on, in this process. What launches would take is added to the list."""
    compiled: list[Resources] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        kernel = run(self, *arguments, **(options | {"warmup": True}))
        compiled.append(_resources(kernel))

    triton.runtime.driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    return compiled


def _resources(kernel: Any) -> Resources:  # noqa: ANN401
    # The compiler's answer to code that it cannot express, without an error.
    assert not _TRAP.search(kernel.asm["ptx"]), f"{kernel.metadata.name}: compiled to a trap"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _USAGE.search(said)
    assert usage is not None, said
    registers, stack_bytes, local_bytes = (int(number) for number in usage.groups())
    return Resources(
        kernel=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        spilled_bytes=stack_bytes + local_bytes,
        shared_bytes=kernel.metadata.shared,
        loads_ahead=max(map(int, _LOADS_AHEAD.findall(kernel.asm["ttgir"])), default=0),
    )


def main() -> None:
    capability = int(sys.argv[1])
    compiled = compile_instead_of_launching(capability)
    for name in sys.argv[2:] or CASES:
        if capability in CASES[name].capabilities:
            CASES[name].launch()
        for each in compiled:
            sys.stdout.write(json.dumps({"case": name, **asdict(each)}) + "\n")
        sys.stdout.flush()
        compiled.clear()


if __name__ == "__main__":
    main()
