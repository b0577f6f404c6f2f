"""The simulation notices code that is broken on purpose: each way of breaking it is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from executor_service.steps.row_table import RowTable
from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.outcomes.losses import Losses
from scheduler_service.core.scheduler import Scheduler
from splitserve_client.errors import ServerUnreachable
from splitserve_client.resumable_request import ResumableRequest
from tests.simulation.faults import (
    Fault,
    break_off,
    cut,
    fail_rows,
    kill_executor,
    kill_scheduler,
    reset,
)
from tests.simulation.history import run_history

# Most histories that it may take, each with so many faults.
_MOST = 200
_NUM_FAULTS = 6


def _loses_one(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *arguments: original(*arguments)[1:]


def _does_nothing(_original: object) -> Callable[..., None]:
    return lambda *_arguments, **_options: None


def _knows_positions_alone(original: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
    def chain(*arguments: Any) -> list[bytes]:  # noqa: ANN401
        return [b"%d" % number for number in range(len(original(*arguments)))]

    return chain


def _goes_on_blindly(_original: object) -> Callable[..., bool]:
    return lambda _request, error: isinstance(error, ServerUnreachable)


# Where it is, what is done to it, and which faults bring it to light.
BREAKAGES: dict[str, tuple[type, str, Callable[[Any], Any], Sequence[Fault]]] = {
    "a lost core keeps a request": (Scheduler, "evacuate", _loses_one, (kill_executor, reset)),
    "a failed step is believed": (Losses, "lose_step", _does_nothing, (fail_rows,)),
    "blocks are never freed": (BlockPool, "free", _does_nothing, ()),
    "prefixes are taken for others": (PrefixCache, "chain", _knows_positions_alone, ()),
    "tables are not extended": (RowTable, "write_tables", _does_nothing, ()),
    "a client forgets its tokens": (
        ResumableRequest,
        "note_token",
        _does_nothing,
        (kill_scheduler, reset, cut),
    ),
    "a client tells twice what it had before a break": (
        ResumableRequest,
        "may_go_on",
        _goes_on_blindly,
        (break_off,),
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_simulation_finds_a_fault_of_ours_when(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, breakage, faults = BREAKAGES[name]
    assert not any(_problems(range(2), faults))
    monkeypatch.setattr(owner, method, breakage(getattr(owner, method)))
    assert any(_problems(range(_MOST), faults)), "nothing was noticed"


def _problems(seeds: Iterable[int], faults: Sequence[Fault]) -> Iterable[list[str]]:
    several = list(itertools.islice(itertools.cycle(faults), _NUM_FAULTS)) if faults else []
    for seed in seeds:
        yield run_history(seed, faults=several).problems
