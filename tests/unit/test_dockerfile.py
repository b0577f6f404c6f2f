"""What is in the images, or their build fails. `make compose-test` builds them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def instructions(stage: str) -> list[str]:
    """The instructions of a stage, each on one line; without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    (body,) = re.findall(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    return [line for line in body.splitlines() if line]


def position(stage: str, part: str) -> int:
    """Which instruction of `stage` has `part`; exactly one does."""
    (found,) = [n for n, line in enumerate(instructions(stage)) if part in line]
    return found


def test_no_step_of_a_build_goes_on_when_it_failed() -> None:
    assert not re.search(r"\|\|\s*(true|:)([;\s]|$)", DOCKERFILE)
    assert not re.search(r";\s*(true|exit 0)\s*$", DOCKERFILE, re.M)


def test_kernels_are_compiled_in_the_last_command_of_their_step() -> None:
    compiling = instructions("kernels")[position("kernels", "splitserve_kernels.cpu.build")]
    # Its exit code is that of the step.
    assert compiling.endswith("&& python3 -m splitserve_kernels.cpu.build /kernels")


def test_executor_has_a_c_compiler_and_the_headers_of_python() -> None:
    installing = instructions("executor")[position("executor", "apt-get install")]
    installed = re.findall(r"install -qq -y --no-install-recommends ([^&};]+)", installing)
    assert {name for names in installed for name in names.split()} == {
        "gcc", "libc6-dev", "python3-dev",
    }  # fmt: skip
    assert "Python.h" in installing


def test_executor_is_not_built_without_a_module_compiled_in_it() -> None:
    trying = position("executor", "RUN python -m splitserve_kernels.toolchain")
    # As the image is used: with its kernels, its packages and its user.
    for part in ("COPY --from=kernels", ".whl)[executor]", "USER ", "SPLITSERVE_KERNEL_CACHE="):
        assert position("executor", part) < trying


def test_images_have_the_versions_that_ci_tests_with() -> None:
    (setting,) = re.findall(r"PIP_CONSTRAINT=(\S+)", DOCKERFILE)

    assert setting == "/opt/constraints.txt"
    assert position("runtime", "COPY constraints.txt /opt/") < position("runtime", "RUN ")
    for stage in ("scheduler", "gateway", "executor"):
        assert f"FROM runtime AS {stage}\n" in DOCKERFILE
