"""Equal parameters of sampling are one set, which travels once in a batch and counts once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from operator import attrgetter

from scheduler_service.core.sampling_params import ID_BYTES, SamplingParams

_STAY_HERE = frozenset({"max_tokens", "ignore_eos", "n", "best_of"})
_COMPARED_OTHERWISE = frozenset({"logit_bias", "beam", "min_tokens", "stop_token_ids"})
_compared = attrgetter(
    *sorted({f.name for f in fields(SamplingParams)} - _STAY_HERE - _COMPARED_OTHERWISE)
)


class ParamsSet:
    """What executors are told of sampling, for all requests of a core that ask for the same.

    `stop_token_ids`: all that ends a sequence, if they are told that. `num_bytes` of both, and
    `needs_history`, may take long to find. `num_requests`: unfinished
    ones that have it; `num_running`: those of them that run. `encoded`: what a codec made of it;
    None before. A set that no engine has yet is that of a single waiting request.
    """

    __slots__ = (
        "_key",
        "encoded",
        "needs_history",
        "num_bytes",
        "num_requests",
        "num_running",
        "params",
        "stop_token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: frozenset[int] = frozenset(),
        num_requests: int = 0,
        num_running: int = 0,
    ) -> None:
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.num_bytes = params.num_bytes + ID_BYTES * len(stop_token_ids)
        self.needs_history = params.needs_history
        self.num_requests = num_requests
        self.num_running = num_running
        self.encoded: bytes | None = None
        self._key: Hashable = None

    @property
    def key(self) -> Hashable:
        """Equal for parameters that executors are told alike."""
        if self._key is None:
            self._key = _key(self.params, self.stop_token_ids)
        return self._key

    def __reduce__(self) -> tuple[type[ParamsSet], tuple[SamplingParams, frozenset[int], int, int]]:
        values = (self.params, self.stop_token_ids, self.num_requests, self.num_running)
        return ParamsSet, values


# Of a request that no core has.
OF_NO_CORE = ParamsSet(SamplingParams())


class ParamsSets:
    """The sets of all unfinished requests. `num_running_bytes`: of those in which some run."""

    def __init__(self) -> None:
        self._sets: dict[Hashable, ParamsSet] = {}
        self.num_running_bytes = 0

    def __getstate__(self) -> list[ParamsSet]:
        return list(self._sets.values())

    def __setstate__(self, sets: list[ParamsSet]) -> None:
        self._sets = {each.key: each for each in sets}
        self.num_running_bytes = sum(each.num_bytes for each in sets if each.num_running)

    def find(self, params_set: ParamsSet) -> ParamsSet | None:
        """Returns the known set that equals `params_set`; None if there is none."""
        return self._sets.get(params_set.key)

    def take(self, params_set: ParamsSet) -> ParamsSet:
        """Counts one more request of a set; returns the known equal set, or this one."""
        found = self._sets.setdefault(params_set.key, params_set)
        found.num_requests += 1
        return found

    def give_back(self, params_set: ParamsSet) -> None:
        """A request of a set has ended."""
        params_set.num_requests -= 1
        if params_set.num_requests == 0:
            del self._sets[params_set.key]

    def start(self, params_set: ParamsSet) -> None:
        """A request of a set runs from now on."""
        if params_set.num_running == 0:
            self.num_running_bytes += params_set.num_bytes
        params_set.num_running += 1

    def stop(self, params_set: ParamsSet) -> None:
        """A request of a set does not run any more."""
        params_set.num_running -= 1
        if params_set.num_running == 0:
            self.num_running_bytes -= params_set.num_bytes


def _key(params: SamplingParams, stop_token_ids: frozenset[int]) -> Hashable:
    """The same for parameters that are told the same."""
    told_stops = params.stop_token_ids if params.min_tokens else None
    bias = frozenset(params.logit_bias.items()) if params.logit_bias else None
    is_beam = params.beam is not None
    return _compared(params), params.min_tokens, told_stops, bias, is_beam, stop_token_ids
