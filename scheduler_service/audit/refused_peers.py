"""Refusals, few enough that a flood of them fills no disk and hides nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from scheduler_service.audit.events import CallerRefused, ExecutorRefused, RequestRefused

# Refusals that are told apart in one second. Further ones are told apart by what servers say of
# them, and that is a few names.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused | RequestRefused
# Type, host, caller, method or limit, and reason.
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
    if isinstance(event, RequestRefused):
        return type(event), "", event.caller, event.limit, event.reason
    caller, method = ("", "")
    if isinstance(event, CallerRefused):
        caller, method = event.caller, event.method
    return type(event), _host(event.peer), caller, method, event.reason


def _of_others(event: Refusal) -> Refusal:
    if isinstance(event, RequestRefused):
        return replace(event, caller=OTHERS, tenant="", request_id="")
    if isinstance(event, CallerRefused):
        return replace(event, peer=OTHERS, caller="")
    return replace(event, peer=OTHERS, address="")


def _host(peer: str) -> str:
    """Without the port, which is another for each connection: `ipv4:127.0.0.1:4711`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
