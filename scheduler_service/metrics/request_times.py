"""How long requests wait: for their turn, for tokens, and for their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_service.core.plan import StepEvents, StepPlan, TokenEvent
from scheduler_service.core.request import Request
from scheduler_service.metrics.token_gaps import TokenGaps
from splitserve_metrics.bulk_histogram import BulkHistogram
from splitserve_metrics.instruments import Instruments

_S = 1e9


@dataclass(slots=True)
class _Open:
    """An unfinished request. `last_ns`: the latest token of each of several sequences."""

    submitted_ns: int
    has_begun: bool = False
    lost_ns: int | None = None
    last_ns: dict[int, int] = field(default_factory=dict)


class RequestTimes:
    """Times of requests, which are known by their `client_key`."""

    def __init__(self, instruments: Instruments) -> None:
        self._first_token = instruments.histogram("splitserve_time_to_first_token_seconds")
        self._queue = instruments.histogram("splitserve_queue_time_seconds")
        self._duration = instruments.histogram("splitserve_request_duration_seconds")
        self._recovery = instruments.histogram("splitserve_recovery_seconds")
        self._output_tokens = instruments.counter("splitserve_output_tokens_total")
        self.between_tokens = BulkHistogram(
            instruments.metric("splitserve_inter_token_latency_seconds"), 1 / _S
        )
        self._gaps = self.between_tokens.labels()
        self._open: dict[int, _Open] = {}
        # Of requests of one sequence. Apart from the above: steps go through it.
        self._of_one = TokenGaps(self._gaps)
        self._recovering: set[int] = set()

    @property
    def num_remembered(self) -> int:
        """Of requests, and of sets of them."""
        return len(self._open) + self._of_one.num_remembered

    def submitted(self, request: Request, now_ns: int) -> None:
        """Takes note of a request that was taken."""
        self._open[request.client_key] = _Open(now_ns)

    def ended(self, request: Request, now_ns: int) -> None:
        """Takes note of the end of a request; nothing of it is remembered."""
        key = request.client_key
        known = self._open.pop(key, None)
        self._of_one.ended(key)
        self._recovering.discard(key)
        if known is not None:
            self._duration.observe((now_ns - known.submitted_ns) / _S)

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """Takes note of a step that was sent: requests that begin with it waited until now."""
        for row in plan.new_rows:
            known = self._open.get(row.sequence.request.client_key)
            if known is not None and not known.has_begun:
                known.has_begun = True
                self._queue.observe((now_ns - known.submitted_ns) / _S)

    def lost(self, requests: Iterable[Request], now_ns: int) -> None:
        """Takes note of requests whose executor is lost."""
        for request in requests:
            known = self._open.get(request.client_key)
            if known is not None and known.lost_ns is None:
                known.lost_ns = now_ns
                self._recovering.add(request.client_key)

    def delivered(self, events: StepEvents, now_ns: int) -> None:
        """Takes note of tokens that clients were sent, and of requests that ended."""
        if len(events.client_keys):
            self._tokens_of_one(events.client_keys, now_ns)
        if events.tokens:
            # What one gets that was just preempted comes here, too; before and after it plain ones.
            told = [_key_and_index(token) for token in events.tokens]
            of_one = [key for key, index in told if index is None]
            if of_one:
                self._tokens_of_one(np.array(of_one, np.int64), now_ns)
            for (key, index), num_tokens in Counter(told).items():
                if index is not None:
                    self._tokens_of_several(key, index, num_tokens, now_ns)
        for request in events.finished:
            self.ended(request, now_ns)

    def _tokens_of_one(self, keys: npt.NDArray[np.int64], now_ns: int) -> None:
        """A token for each of `keys`, of which some may be there several times."""
        self._output_tokens.inc(len(keys))
        if self._recovering:
            for key in self._recovering.intersection(keys.tolist()):
                self._recovered(key, now_ns)
        for key in self._of_one.add(keys, now_ns, self._open):
            self._first_token.observe((now_ns - self._open[key].submitted_ns) / _S)

    def _tokens_of_several(self, key: int, index: int, num_tokens: int, now_ns: int) -> None:
        """So many tokens of sequence `index`, which has siblings."""
        self._output_tokens.inc(num_tokens)
        known = self._open.get(key)
        if known is None:
            return
        self._recovered(key, now_ns)
        if not known.last_ns:
            self._first_token.observe((now_ns - known.submitted_ns) / _S)
        elif index in known.last_ns:
            self._gaps.repeat((now_ns - known.last_ns[index]) / num_tokens, num_tokens)
        known.last_ns[index] = now_ns

    def _recovered(self, key: int, now_ns: int) -> None:
        self._recovering.discard(key)
        known = self._open.get(key)
        if known is not None and known.lost_ns is not None:
            self._recovery.observe((now_ns - known.lost_ns) / _S)
            known.lost_ns = None


def _key_and_index(token: TokenEvent) -> tuple[int, int | None]:
    """Of its request, and of its sequence if that has siblings."""
    sequence = token.sequence
    request = sequence.request
    return request.client_key, sequence.index if len(request.sequences) > 1 else None
