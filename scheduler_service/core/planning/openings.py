"""What a core could begin soon: whoever has requests for several cores asks each.

A core that is given only what its next step may begin leaves the others where all can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler_service.core.blocks.prefix_cache import NO_HIT
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.lack import Lack
from scheduler_service.core.placement import Placement, num_rows_wanted
from scheduler_service.core.planning.beside import Beside
from scheduler_service.core.planning.room import MAX_BYPASSES, Room
from scheduler_service.core.request import Request, RequestStatus

# Requests that may wait at a time for others to make way for them.
_MAX_YIELDED_TO = 4


class Openings:
    """Compares a request with what there is, and with what was given since the last step."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._policy = placement.waiting
        self._room = Room(config, placement)
        self._beside = Beside()
        self._num_yielded_to = 0
        # Tokens of a step that are left beside prompts that are being computed; None: look again.
        self._num_tokens_left: int | None = None

    def step_planned(self) -> None:
        """Whoever was given before has begun, or lacks something that the core waits for."""
        self._beside = Beside()
        self._num_yielded_to = 0
        self._num_tokens_left = None

    def given(self, request: Request) -> None:
        """A request waits for the next step."""
        num_rows = num_rows_wanted(request)
        self._beside.num_requests += 1
        self._beside.num_rows += num_rows
        if request.unfinished:
            leader = request.unfinished[0]
            hit, num_tokens = self._placement.blocks.prefixes.find(leader), len(leader.token_ids)
            self._beside.num_tokens += num_tokens - hit.num_tokens
            self._beside.num_blocks += num_rows * self._config.num_blocks_for(num_tokens)
        self._beside.rows_of_tenants[request.scheduling.tenant] += num_rows

    @property
    def is_open(self) -> bool:
        """Whether some request could begin; the look that costs least."""
        return self.has_tokens_left and self.is_open_soon

    @property
    def has_tokens_left(self) -> bool:
        """Whether the next step can take more tokens."""
        return self._beside.num_tokens < self._tokens_left

    @property
    def is_open_soon(self) -> bool:
        """Whether some request could begin once prompts are computed that keep others waiting."""
        placement = self._placement
        return (
            self._takes_others
            and placement.num_unreserved_rows > self._beside.num_rows
            and self.num_blocks_left > (placement.blocks.watermark if len(placement.rows) else 0)
        )

    @property
    def num_blocks_left(self) -> int:
        """Free blocks, but for those of requests that were given since the last step."""
        return self._placement.blocks.device.num_free - self._beside.num_blocks

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are to be computed before somebody who comes now: of prompts, and of rows."""
        num_prompt_tokens = self._config.max_num_batched_tokens - self._tokens_left
        return num_prompt_tokens + self._beside.num_tokens

    @property
    def nobody_waits(self) -> bool:
        """Whether a request would be the first to wait here."""
        return not self._placement.swapped and len(self._placement.waiting) == 0

    def what_lacks(self, request: Request) -> Lack | None:
        """What a request that fits lacks to begin with the next step, with nobody yielding.

        Of one that another core has no cached prefix counts: its hashes are that core's.
        """
        if not request.unfinished:
            return None  # it has all its tokens
        if not self._takes_others or not self.has_tokens_left:
            return Lack.BUDGET
        if not self._room.has_adapter_slot(request):
            return Lack.ADAPTER_SLOT
        self._room.begin_step()
        leader = request.unfinished[0]
        lack = self._room.what_lacks(request, leader, NO_HIT, self._beside)
        if lack in (Lack.BLOCKS, Lack.POOL) and request.status is RequestStatus.ABSENT:
            prefixes = self._placement.blocks.prefixes
            prefixes.adopt(leader)
            lack = self._room.what_lacks(request, leader, prefixes.find(leader), self._beside)
        # What can never run is the core's to say.
        return None if lack is Lack.POOL else lack

    def may_yield_to(self, request: Request) -> bool:
        """Whether somebody runs here who may have to make way for a request."""
        order = self._placement.rows.order
        if self._num_yielded_to >= _MAX_YIELDED_TO or len(order) == 0:
            return False
        least_urgent = self._placement.rows.sequence(int(order[-1])).request
        # Of the same class some take tokens of a step from others, but neither rows nor blocks.
        if self._tokens_left <= 0 and self._policy.urgency(request) < self._policy.urgency(
            least_urgent
        ):
            return True
        return self._policy.may_preempt(request, least_urgent)

    def yields_to(self, request: Request) -> None:
        """A request was given that others may have to make way for."""
        self._num_yielded_to += 1

    @property
    def movable(self) -> Iterator[Request]:
        """Those that could as well wait elsewhere, swapped ones first."""
        placement = self._placement
        return filter(self.is_movable, [*placement.swapped, *placement.queued])

    def is_movable(self, request: Request) -> bool:
        """Whether nothing of a request runs here, or is yet to come from a step in flight.

        Who is tried apart stays.
        """
        is_idle = request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED)
        return is_idle and self._placement.is_settled(request) and not request.trial_size

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _takes_others(self) -> bool:
        """Whether those that wait here leave anything to others."""
        placement = self._placement
        if placement.swapped:
            return False
        num_older = len(placement.waiting) - self._beside.num_requests
        if num_older <= 0:
            return True
        return not any(map(self._holds_up_others, placement.waiting))

    def _holds_up_others(self, request: Request) -> bool:
        """Whether nobody may pass a request that waits here: see `planning/admitter.py`."""
        may_be_passed = self._policy.allows_bypasses or not self._room.has_adapter_slot(request)
        return not may_be_passed or request.num_bypasses >= MAX_BYPASSES

    @property
    def _tokens_left(self) -> int:
        if self._num_tokens_left is None:
            rows = self._placement.rows
            pending = rows.num_tokens[rows.order] - rows.num_computed[rows.order]
            num_prompt_tokens = int(np.where(pending > 1, pending, 0).sum())
            self._num_tokens_left = self._config.max_num_batched_tokens - num_prompt_tokens
        return self._num_tokens_left
