"""Refusals, few enough that a flood of them fills no disk and hides nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from scheduler_service.audit.events import CallerRefused, ExecutorRefused, RequestRefused
from splitserve_rpc.addresses import peer_host

# Refusals that are told apart in one second. Further ones are told apart by what servers say of
# them, and that is a few names.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused | RequestRefused
# Type, host, caller, what was tried, and why it was refused.
_Key: TypeAlias = tuple[type[Refusal], str, str, str, str]


@dataclass(slots=True)
class _Second:
    first: Refusal
    number: int
    num_more: int = 0


class RefusedPeers:
    """Lets the first refusal of its kind in a second pass, and counts the rest."""

    def __init__(self) -> None:
        self._seconds: dict[_Key, _Second] = {}

    def add(self, event: Refusal, now_s: float) -> Refusal | None:
        """What is to be written now. Call `take_past` before."""
        key = _key(event)
        if key not in self._seconds and len(self._seconds) >= MAX_PEERS:
            event = _of_others(event)
            key = _key(event)
        second = self._seconds.get(key)
        if second is None:
            self._seconds[key] = _Second(event, int(now_s))
            return event
        second.num_more += event.num_times
        return None

    def take_past(self, now_s: float) -> list[Refusal]:
        """What was counted in seconds that are over."""
        past = [key for key, second in self._seconds.items() if second.number != int(now_s)]
        seconds = [self._seconds.pop(key) for key in past]
        return [replace(each.first, num_times=each.num_more) for each in seconds if each.num_more]

    def take_all(self) -> list[Refusal]:
        """What was counted so far."""
        return self.take_past(-1.0)


def _key(event: Refusal) -> _Key:
    match event:
        case CallerRefused():
            host = peer_host(event.peer)
            return CallerRefused, host, event.caller, event.method, event.reason
        case ExecutorRefused():
            return ExecutorRefused, peer_host(event.peer), "", "", event.reason
        case RequestRefused():
            return RequestRefused, "", event.caller, event.limit, event.reason


def _of_others(event: Refusal) -> Refusal:
    match event:
        case CallerRefused():
            return replace(event, peer=OTHERS, caller="")
        case ExecutorRefused():
            return replace(event, peer=OTHERS, address="")
        case RequestRefused():
            return replace(event, caller=OTHERS, tenant="", request_id="")
