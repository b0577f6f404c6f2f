"""How long requests wait: for their turn, for tokens, and for their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.plan import StepEvents, StepPlan
from scheduler_service.core.request import Request
from splitserve_metrics.bulk_histogram import BulkHistogram
from splitserve_metrics.instruments import Instruments

_S = 1e9


@dataclass(slots=True)
class _Open:
    """An unfinished request. `last_ns`: the latest token of each sequence that is told apart."""

    submitted_ns: int
    has_begun: bool = False
    lost_ns: int | None = None
    last_ns: dict[int, int] = field(default_factory=dict)


class RequestTimes:
    """Told as `Observer` is. Requests are known by their `client_key`."""

    def __init__(self, instruments: Instruments, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._first_token = instruments.histogram("splitserve_time_to_first_token_seconds")
        self._queue = instruments.histogram("splitserve_queue_time_seconds")
        self._duration = instruments.histogram("splitserve_request_duration_seconds")
        self._recovery = instruments.histogram("splitserve_recovery_seconds")
        self._output_tokens = instruments.counter("splitserve_output_tokens_total")
        self.between_tokens = BulkHistogram(
            instruments.metric("splitserve_inter_token_latency_seconds")
        )
        self._open: dict[int, _Open] = {}
        # Of requests with plain tokens, the latest. Apart from the above: steps go through it.
        self._last_ns: dict[int, int] = {}
        self._recovering: set[int] = set()

    @property
    def num_open(self) -> int:
        """Requests that it remembers."""
        return len(self._open)

    def submitted(self, request: Request) -> None:
        """It was taken."""
        self._open[request.client_key] = _Open(self._now_ns())

    def ended(self, request: Request) -> None:
        """It is over."""
        key = request.client_key
        known = self._open.pop(key, None)
        self._last_ns.pop(key, None)
        self._recovering.discard(key)
        if known is not None:
            self._duration.observe((self._now_ns() - known.submitted_ns) / _S)

    def planned(self, plan: StepPlan) -> None:
        """A step is on its way; those that it computes first have waited until now."""
        for row in plan.new_rows:
            known = self._open.get(row.sequence.request.client_key)
            if known is not None and not known.has_begun:
                known.has_begun = True
                self._queue.observe((self._now_ns() - known.submitted_ns) / _S)

    def lost(self, requests: Iterable[Request]) -> None:
        """The executor that had them is lost."""
        now_ns = self._now_ns()
        for request in requests:
            known = self._open.get(request.client_key)
            if known is not None and known.lost_ns is None:
                known.lost_ns = now_ns
                self._recovering.add(request.client_key)

    def delivered(self, events: StepEvents) -> None:
        """Clients get these tokens."""
        now_ns = self._now_ns()
        if len(events.client_keys):
            self._plain_tokens(events.client_keys.tolist(), now_ns)
        for event in events.tokens:
            self._token(event.sequence.request.client_key, event.sequence.index, now_ns)

    def _plain_tokens(self, keys: list[int], now_ns: int) -> None:
        """A token for each of `keys`, of which some may be there several times."""
        self._output_tokens.inc(len(keys))
        if self._recovering:
            for key in self._recovering.intersection(keys):
                self._recovered(key, now_ns)
        last_ns = self._last_ns
        latest = dict.fromkeys(keys, now_ns)
        # For each row of each step: no loop of ours.
        before = list(map(last_ns.get, latest))
        has_firsts = None in before
        if len(latest) < len(keys):
            self._observe_runs(keys, now_ns)
        elif has_firsts:
            known_ns = [each for each in before if each is not None]
            self.between_tokens.observe((now_ns - np.array(known_ns, np.int64)) / _S)
        else:
            self.between_tokens.observe((now_ns - np.array(before, np.int64)) / _S)
        if has_firsts:
            for key in [key for key in latest if key not in last_ns]:
                known = self._open.get(key)
                if known is None:
                    del latest[key]  # it ended before its token came
                else:
                    self._first_token.observe((now_ns - known.submitted_ns) / _S)
        last_ns.update(latest)

    def _observe_runs(self, keys: list[int], now_ns: int) -> None:
        """Some have several tokens, each of which took its part of the time since the one before.

        Of those that come with a sequence's first token nothing is known.
        """
        counts = {key: n for key, n in Counter(keys).items() if key in self._last_ns}
        if counts:
            gaps = np.array([now_ns - self._last_ns[key] for key in counts])
            each = np.array(list(counts.values()))
            self.between_tokens.observe(np.repeat(gaps / each / _S, each))

    def _token(self, key: int, index: int, now_ns: int) -> None:
        """A token of sequence `index`."""
        self._output_tokens.inc()
        known = self._open.get(key)
        if known is None:
            return
        self._recovered(key, now_ns)
        if not known.last_ns:
            self._first_token.observe((now_ns - known.submitted_ns) / _S)
        elif index in known.last_ns:
            self.between_tokens.observe(np.array([now_ns - known.last_ns[index]]) / _S)
        known.last_ns[index] = now_ns

    def _recovered(self, key: int, now_ns: int) -> None:
        self._recovering.discard(key)
        known = self._open.get(key)
        if known is not None and known.lost_ns is not None:
            self._recovery.observe((now_ns - known.lost_ns) / _S)
            known.lost_ns = None
