"""What the compiler made of all cases, recorded beside this for the sources that it was made of.

Compiling takes half a minute of a core for each capability. `python -m
tests.kernels.gpu.compiled.records` records what it makes of changed kernels; whoever does not do
that waits for the compiler in each fresh clone, and the tests say the same.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

import splitserve_kernels
from tests.kernels.gpu.compiled.cases import CAPABILITIES

KERNELS = Path(splitserve_kernels.__file__).parent
_RECORDED = Path(__file__).with_name("recorded")


def recorded(capability: int) -> str | None:
    """A line of JSON for each kernel of each case; None where that is of other sources."""
    if not _file(capability).exists():
        return None
    sources, _, lines = _file(capability).read_text().partition("\n")
    return lines if sources == hash_of_sources() else None


def compiled_anew(capability: int) -> str:
    """The same lines, by the compiler."""
    with TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_CACHE_DIR": cache,
            "TRITON_INTERPRET": "0",
        }
        result = subprocess.run(
            [sys.executable, "-m", "tests.kernels.gpu.compiled.compiler", str(capability)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    return result.stdout


def hash_of_sources() -> str:
    """A digest of the compiler's version and of all code that a compiled kernel may depend on."""
    digest = hashlib.sha256(triton.__version__.encode())
    for path in _sources():
        digest.update(_code(path).encode())
    return digest.hexdigest()[:32]


def _code(path: Path) -> str:
    """The statements of a module, without comments, docstrings and layout."""
    tree, documented = ast.parse(path.read_text()), (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _sources() -> Iterator[Path]:
    """All that a compiled kernel may depend on, and more; not this file."""
    yield from sorted(KERNELS.glob("*.py"))
    for path in sorted((KERNELS / "gpu").rglob("*.py")):
        # Those launch what others compiled.
        if not path.name.startswith("flash_attention"):
            yield path
    yield from sorted({*Path(__file__).parent.glob("*.py")} - {Path(__file__)})


def _file(capability: int) -> Path:
    return _RECORDED / f"{capability}.jsonl"


def main() -> None:
    """Records all capabilities."""
    for capability in CAPABILITIES:
        _file(capability).write_text(f"{hash_of_sources()}\n{compiled_anew(capability)}")


if __name__ == "__main__":
    main()
