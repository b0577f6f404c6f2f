"""Reasons for admission: why an executor got a request, and what blocks a request from beginning.

Assignments are for logs and metrics only; no decision uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AssignedFor(Enum):
    """Reason for which a request was assigned to an executor.

    ONLY_ONE: no other executor could begin the request soon. MOST_CACHED: more of it is cached
    there. SOONEST: less work is before it there. AS_GOOD: no other executor is better.
    BETTER_IS_BUSY: another executor is better, but not by enough to wait for it.
    WAITED_LONG_ENOUGH: the request did wait for a better executor. OTHERS_YIELD: less urgent
    requests there make room for it. NO_ROOM_ANYWHERE: the request had a reservation there, since no
    executor had room. TRIED_ALONE: executors may have died of the request, which runs alone there
    (`scheduler/quarantine.py`). RETRIED: the request failed on another executor.
    """

    ONLY_ONE = "only_one"
    MOST_CACHED = "most_cached"
    SOONEST = "soonest"
    AS_GOOD = "as_good_as_others"
    BETTER_IS_BUSY = "better_is_busy"
    WAITED_LONG_ENOUGH = "waited_long_enough"
    OTHERS_YIELD = "others_yield"
    NO_ROOM_ANYWHERE = "no_room_anywhere"
    TRIED_ALONE = "tried_alone"
    RETRIED = "retried"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Reason for an assignment and the numbers behind it, as they were before the request began.

    `num_cached`: prompt tokens of the request cached at the executor. `num_ahead`: prompt tokens
    computed there before the request or with it. `num_running`: sequences with a row there.
    `cost_us`: estimated time until the request's first token there, in µs, as the router compares
    it. `num_cached_elsewhere`, `cost_elsewhere_us`: the same of the best other executor, which may
    be better; None without one.
    """

    why: AssignedFor
    num_cached: int = 0
    num_ahead: int = 0
    num_running: int = 0
    cost_us: int | None = None
    num_cached_elsewhere: int | None = None
    cost_elsewhere_us: int | None = None


# -- Admission blockers ----------------------------------------------------------------------------


class AdmissionBlocker(Enum):
    """Reason for which a request cannot have a row and blocks of an engine now.

    POOL: no pool of this size will ever have enough blocks for the request. OTHERS_FIRST: preempted
    requests of the engine, or suspects on trial, go before it. RESULTS, BUDGET (tokens of a step)
    and BLOCKS_ON_THEIR_WAY pass without any request leaving.
    """

    ADAPTER_SLOT = "adapter_slot"
    ADAPTER_LOAD = "adapter_load"
    ADAPTER_FAILED = "adapter_failed"
    BLOCKS = "blocks"
    ROWS = "rows"
    BYTES = "bytes"
    SHARE = "share"
    POOL = "pool"
    OTHERS_FIRST = "others_wait_there"
    # Blockers that pass without any request leaving; no other request goes first.
    RESULTS = "results"
    BUDGET = "budget"
    BLOCKS_ON_THEIR_WAY = "blocks_on_their_way"
