"""Faults of ours, planted on purpose: what the simulation must find, and how long it takes to.

`python -m tests.simulation.planted` says for each how many histories of `make simulate`, and how
many seconds of this process's own time, it took to find it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np

from executor_service.steps import run_on
from executor_service.steps.row_table import RowTable
from executor_service.steps.sampled_inputs import SampledInputs
from executor_service.steps.step import StepInput, StepOutput
from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.outcomes.losses import Losses
from scheduler_service.core.outcomes.shortfalls import Shortfalls
from scheduler_service.core.planning.run_ahead import RunAhead
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_health import ExecutorHealth
from scheduler_service.fleet import fleet_queue
from splitserve_client import SamplingParams
from splitserve_client.errors import ServerUnreachable
from splitserve_client.resumable_request import ResumableRequest
from tests.simulation.faults import (
    Fault,
    break_off,
    cut,
    drain_executor,
    fail_rows,
    kill_executor,
    kill_scheduler,
    reset,
)
from tests.simulation.history import run_history
from tests.simulation.scenario import (
    Draw,
    Scenario,
    burst,
    contended,
    disturbed,
    growing,
    one_sick,
    random_scenario,
)
from tests.simulation.workload import Wanted

# So many of the faults that bring it to light, in each history that is to have them.
_NUM_FAULTS = 6


@dataclass(frozen=True)
class Planted:
    """Where it is, what is done to it, and what brings it to light soonest."""

    owner: Any
    name: str
    change: Callable[[Any], Any]
    draw: Draw

    @contextmanager
    def there(self) -> Iterator[None]:
        """Our code has it within."""
        changed = self.change(getattr(self.owner, self.name))
        with mock.patch.object(self.owner, self.name, changed):
            yield


def _with(*faults: Fault) -> Draw:
    several = [faults[number % len(faults)] for number in range(_NUM_FAULTS)] if faults else []
    return partial(disturbed, faults=several)


def _loses_one(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *arguments: original(*arguments)[1:]


def _does_nothing(_original: object) -> Callable[..., None]:
    return lambda *_arguments, **_options: None


def _never(_original: object) -> property:
    return property(lambda _self: None)


def _tells_nobody(original: Callable[..., object]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        original(*arguments)

    return call


def _knows_positions_alone(original: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
    def chain(*arguments: Any) -> list[bytes]:  # noqa: ANN401
        return [b"%d" % number for number in range(len(original(*arguments)))]

    return chain


def _goes_on_blindly(_original: object) -> Callable[..., bool]:
    return lambda _request, error: isinstance(error, ServerUnreachable)


def _by_arrival(original: Callable[..., object]) -> Callable[..., object]:
    return lambda _policy, weights: original("fcfs", weights)


def _believes_drafts(original: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
    """Whatever was sampled before a draft, it was that draft."""

    def verify(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
        def execute_lines(lines: StepInput) -> StepOutput:
            output = execute(lines)
            ends = lines.num_computed_tokens + lines.num_new_tokens
            before = np.flatnonzero(lines.num_computed_tokens[1:] == ends[:-1])
            inputs = lines.token_ids[np.cumsum(lines.num_new_tokens) - 1]
            output.sampled_token_ids[before] = inputs[before + 1]
            return output

        return original(step, execute if step.drafts is None else execute_lines)

    return verify


def _at_most(_original: object) -> Callable[..., object]:
    return lambda _inputs, _row_ids, _step_id, _steps_back, most: most


def _at_whim(original: Callable[..., object]) -> Callable[..., object]:
    whims = itertools.cycle([True, False, True, True, False])
    return lambda *arguments: original(*arguments) if next(whims) else None


def _of_the_best(random: Random) -> Scenario:
    """Requests whose answers come at once, at the end of each: a break may be among them."""
    scenario = _with(break_off)(random)
    wanted = [[replace(each, params=_best_of(each)) for each in some] for some in scenario.wanted]
    return replace(scenario, wanted=wanted)


def _best_of(wanted: Wanted) -> SamplingParams:
    seed = wanted.params.seed
    return SamplingParams(n=3, best_of=4, max_tokens=4, seed=seed, ignore_eos=True)


def _recorded(random: Random) -> Scenario:
    return replace(growing(random), records=True)


PLANTED: Mapping[str, Planted] = MappingProxyType(
    {
        "a lost core keeps a request": Planted(
            Scheduler, "evacuate", _loses_one, _with(kill_executor, reset)
        ),
        "a failed step is believed": Planted(Losses, "lose_step", _does_nothing, _with(fail_rows)),
        "blocks are never freed": Planted(BlockPool, "free", _does_nothing, _with()),
        "prefixes are taken for others": Planted(
            PrefixCache, "chain", _knows_positions_alone, _with()
        ),
        "tables are not extended": Planted(RowTable, "write_tables", _does_nothing, _with()),
        "a client forgets its tokens": Planted(
            ResumableRequest, "note_token", _does_nothing, _with(kill_scheduler, reset, cut)
        ),
        "a client tells twice what it had before a break": Planted(
            ResumableRequest, "may_go_on", _goes_on_blindly, _of_the_best
        ),
        "a core whose grammars compile is not asked again": Planted(
            Scheduler, "ask_again_at_ns", _never, burst
        ),
        "what a drained executor has is forgotten": Planted(
            EngineLoop, "withdraw", _tells_nobody, _with(drain_executor)
        ),
        "results say nothing of executors": Planted(
            ExecutorHealth, "judge", _does_nothing, one_sick
        ),
        "the one queue is in order of arrival": Planted(
            fleet_queue, "make_queue_policy", _by_arrival, contended
        ),
        "nobody is taken back from a busy executor": Planted(
            fleet_queue, "to_be_moved", _does_nothing, contended
        ),
        "tokens that did not come are counted on": Planted(
            Shortfalls, "settle", _does_nothing, growing
        ),
        "rows go on where they would be at most": Planted(
            SampledInputs, "positions", _at_most, growing
        ),
        "drafts are believed": Planted(run_on, "verify_drafts", _believes_drafts, growing),
        "a core decides by what is not recorded": Planted(
            RunAhead, "num_run_on", _at_whim, _recorded
        ),
    }
)


def num_until_found(draw: Draw, seeds: Sequence[int]) -> int | None:
    """How many of these histories it takes until one has a problem; None: none has."""
    for count, seed in enumerate(seeds, 1):
        if run_history(seed, draw=draw).problems:
            return count
    return None


def main() -> int:
    """Ends with 1 if one is not found."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.planted", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often each is looked for (3)")
    parser.add_argument("--most", type=int, default=500, help="histories until it is given up")
    arguments = parser.parse_args()
    num_missed = 0
    for name, planted in PLANTED.items():
        counts, started_s = list[int | None](), time.process_time()
        with planted.there():
            for number in range(arguments.times):
                first = number * arguments.most
                counts.append(
                    num_until_found(random_scenario, range(first, first + arguments.most))
                )
        cpu_s = (time.process_time() - started_s) / arguments.times
        num_missed += None in counts
        sys.stdout.write(f"| {name} | {', '.join(map(str, counts))} | {cpu_s:.1f} |\n")
        sys.stdout.flush()
    return bool(num_missed)


if __name__ == "__main__":
    sys.exit(main())
