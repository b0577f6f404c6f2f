"""Refusals of peers, few enough that a flood of them fills no disk and hides nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.audit.events import CallerRefused, ExecutorRefused
from splitserve_rpc.addresses import peer_host

# Peers that are told apart in one second; all further ones are one.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused


@dataclass(slots=True)
class _Second:
    first: Refusal
    number: int
    num_more: int = 0


class RefusedPeers:
    """Lets the first refusal of a peer in a second pass, and counts the rest."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[type[Refusal], str], _Second] = {}

    def add(self, event: Refusal, now_s: float) -> Refusal | None:
        """What is to be written now. Call `take_past` before."""
        key = (type(event), peer_host(event.peer))
        if key not in self._seconds and len(self._seconds) >= MAX_PEERS:
            key, event = (type(event), OTHERS), replace(event, peer=OTHERS)
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
