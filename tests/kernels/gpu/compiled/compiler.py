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

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_CUOBJDUMP, _NVDISASM, _PTXAS = (_TOOLS / name for name in ("cuobjdump", "nvdisasm", "ptxas"))
# What the assembler says when it makes products wait for each other.
_SERIAL = "wgmma.mma_async instructions are serialized"
_PRODUCT_OR_WAIT = re.compile(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2")
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
        said = _said(_CUOBJDUMP, "--dump-resource-usage", file.name)
        has_products = "wgmma.mma_async" in kernel.asm["ptx"]
        instructions = _said(_NVDISASM, "-c", file.name) if has_products else ""
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
        exponents_beside_products=_exponents_beside_products(instructions),
        is_serial=has_products and _is_serial(kernel.asm["ptx"]),
    )


def _exponents_beside_products(instructions: str) -> int:
    """In the order of the text, of which a loop's end comes before its begin."""
    count, is_under_way = 0, False
    for found in _PRODUCT_OR_WAIT.findall(instructions):
        if found == "MUFU.EX2":
            count += is_under_way
        else:
            is_under_way = found == "HGMMA"
    return count


def _is_serial(ptx: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        assert target is not None
        flags = (f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".cubin")))
        return _SERIAL in _said(_PTXAS, *flags)


def _said(tool: Path, *flags: str) -> str:
    done = subprocess.run([str(tool), *flags], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


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
