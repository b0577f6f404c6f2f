"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Generator

# Tiny tensors: a second thread costs more than it gives, most of all while other tests run beside.
# Torch looks when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from splitserve_common import LOGGING_PACKAGES
from splitserve_kernels.cpu import NativeLibrary, load_library
from splitserve_kernels.cpu.build import BuildFailed

# What fails there is to say with what values, too.
pytest.register_assert_rewrite("tests.support", "tests.contract.stranger", "tests.property")

# On a machine with other work an example may take any time. They are the same each time, so that no
# change fails by what it did not bring; who says how many gets new ones, as make soak does.
settings.register_profile(
    "any_time",
    deadline=None,
    derandomize="SPLITSERVE_TEST_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any_time")

_HAS_GPU = torch.cuda.is_available()
if not _HAS_GPU:
    # Triton's kernels are tested in its interpreter. It looks when it is imported, and whoever
    # imports transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"


# Executors of other tests, or of the machine, are not to take part in their plans.
# Nor are earlier tests to have tried the models of later ones.
os.environ["SPLITSERVE_TRIAL_CACHE"] = "off"
os.environ["SPLITSERVE_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="splitserve-tests-")
atexit.register(shutil.rmtree, os.environ["SPLITSERVE_RUNTIME_DIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What draws without a seed of its own draws the same, whichever tests were before."""
    random.seed(0)
    np.random.seed(0)
    # Not torch.manual_seed: it formats and keeps a stack for each kind of device that is missing.
    torch.default_generator.manual_seed(0)
    if _HAS_GPU:
        torch.cuda.manual_seed_all(0)
    # Tests that call a `main` start its logging.
    for package in LOGGING_PACKAGES:
        if (log := logging.getLogger(package)).level:
            log.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Once their assertions are rewritten.
    from tests.support.thorough import check_reasons, leave_cases

    check_reasons(items)
    leave_cases(items)


@pytest.fixture(scope="session")
def native_library() -> NativeLibrary:
    """The CPU kernels; whoever needs them is skipped where they cannot be compiled."""
    try:
        return load_library()
    except BuildFailed as failure:
        pytest.skip(str(failure))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays: the garbage collector need not look at it, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
