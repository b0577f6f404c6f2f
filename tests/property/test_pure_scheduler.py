"""Random histories of the pure scheduler: requests end as they should, the same way each time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.core.pure_histories import PureHistory
from tests.support.processes.forked import ROOT

_NUM_SEEDS = 4 * int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "12"))
_NUM_PARTS = 4
_SOURCE_ROOTS = (".", "common", "protos", "kernels", "clients")


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_every_request_gets_its_tokens_once_whatever_happens(part: int) -> None:
    for seed in range(part, _NUM_SEEDS, _NUM_PARTS):
        PureHistory(seed).run()


def test_effects_are_the_same_in_processes_whose_sets_have_other_orders() -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in _SOURCE_ROOTS)
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.support.core.pure_histories", "0", "8"],
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert len(digests) == 1
