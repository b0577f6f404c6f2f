"""Downloads what bare CUDA images lack, to be copied to a machine without a package index.

Versions are those of `constraints.txt`, with which the tests run: protobuf and grpcio are copied,
too, since newer packages of gRPC refuse older ones when they are imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_CONSTRAINTS = _ROOT / "constraints.txt"
# What parts that serve, and the tests, need beside torch, transformers and what these require.
SERVER = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf"),
    *("googleapis-common-protos", "jinja2", "llguidance", "prometheus-client"),
)
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
# psutil is for all parts; the others are what the above require.
_BESIDE = (
    *("psutil", "markupsafe"),
    *("execnet", "iniconfig", "pluggy", "pygments", "sortedcontainers"),
)
WHEELS = SERVER + TESTS + _BESIDE
# Of Ubuntu 22.04 (glibc 2.35) and later.
_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)))


def main(flags: list[str] | None = None) -> int:
    """Exit code: 0 if the wheels are there and small enough, 1 if they are not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--max-mib", type=float, default=64.0, help="what may be copied, in all")
    parser.add_argument("--also", nargs="*", type=Path, default=[], help="what is copied beside")
    arguments = parser.parse_args(flags)
    if _download(arguments.folder, arguments.python) != 0:
        return 1
    copied = [*arguments.folder.glob("*.whl"), *arguments.also]
    mib = sum(path.stat().st_size for path in copied) / 2**20
    sys.stdout.write(f"{len(copied)} files, {mib:.1f} of {arguments.max_mib:g} MiB\n")
    return 0 if mib <= arguments.max_mib else 1


def _download(folder: Path, python: str) -> int:
    """Returns the exit code of pip, which says what is wrong."""
    platforms = [flag for name in _PLATFORMS for flag in ("--platform", name)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", python, *platforms, "--dest", str(folder)),
        *pinned(_CONSTRAINTS.read_text(), WHEELS),
    ]
    return subprocess.run(command, check=False).returncode


def pinned(constraints: str, names: tuple[str, ...]) -> list[str]:
    """The lines of `constraints` for `names`. Raises ValueError if one is missing."""
    lines = {
        line.partition("==")[0].lower().replace("_", "-"): line for line in constraints.splitlines()
    }
    missing = [name for name in names if name not in lines]
    if missing:
        raise ValueError(f"constraints.txt has no version of {missing[0]}")
    return [lines[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())
