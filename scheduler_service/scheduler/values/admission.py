"""Why an executor was given a request and no other was: for those who watch.

Nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AssignedFor(Enum):
    """What decided.

    ONLY_ONE: no other was there that could begin it soon. MOST_CACHED: more of it is cached there,
    SOONEST: less is before it there, AS_GOOD: nothing speaks for another. BETTER_IS_BUSY: another
    were better, and not by enough to wait for it; WAITED_LONG_ENOUGH: it did wait for that one.
    OTHERS_YIELD: less urgent ones there make room for it. NO_ROOM_ANYWHERE: it had a reservation
    there, since nobody had room. TRIED_ALONE: whoever executors may have died of goes there
    (`scheduler/quarantine.py`). RETRIED: it failed on another executor.
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
    """What decided, and by which numbers, as they were before the request was given.

    `num_cached`: tokens of it that need not be computed there; `num_ahead`: of prompts that are
    computed there before it or with it; `num_running`: sequences with a row. `cost_us`: by these,
    the time until its first token there, as the router estimates it for comparison. `_elsewhere`:
    the same of the executor that was next best, or better; None if there is none.
    """

    why: AssignedFor
    num_cached: int = 0
    num_ahead: int = 0
    num_running: int = 0
    cost_us: int | None = None
    num_cached_elsewhere: int | None = None
    cost_elsewhere_us: int | None = None


# -- What keeps a request from beginning on an engine now ------------------------------------------


class AdmissionBlocker(Enum):
    """A reason why a request cannot have a row and blocks.

    POOL: no pool like this one will ever have enough blocks for it. OTHERS_FIRST: preempted
    requests of the engine, or suspects that are tried, go before it. RESULTS, BUDGET (tokens of a
    step) and BLOCKS_ON_THEIR_WAY pass by themselves.
    """

    ADAPTER_SLOT = "adapter_slot"
    BLOCKS = "blocks"
    ROWS = "rows"
    BYTES = "bytes"
    SHARE = "share"
    POOL = "pool"
    OTHERS_FIRST = "others_wait_there"
    # All of these pass by themselves, and nobody goes first.
    RESULTS = "results"
    BUDGET = "budget"
    BLOCKS_ON_THEIR_WAY = "blocks_on_their_way"
