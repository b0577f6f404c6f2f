"""Refusals of callers, few enough that a flood of them fills no disk and hides nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.audit.events import CallerRefused

# Peers that are told apart in one second; all further ones are one.
MAX_PEERS = 256
OTHERS = "others"


@dataclass(slots=True)
class _Second:
    first: CallerRefused
    number: int
    num_more: int = 0


class RefusedCallers:
    """Lets the first refusal of a peer in a second pass, and counts the rest."""

    def __init__(self) -> None:
        self._seconds: dict[str, _Second] = {}

    def add(self, event: CallerRefused, now_s: float) -> CallerRefused | None:
        """What is to be written now. Call `take_past` before."""
        host = _host(event.peer)
        if host not in self._seconds and len(self._seconds) >= MAX_PEERS:
            host, event = OTHERS, replace(event, peer=OTHERS)
        second = self._seconds.get(host)
        if second is None:
            self._seconds[host] = _Second(event, int(now_s))
            return event
        second.num_more += event.num_times
        return None

    def take_past(self, now_s: float) -> list[CallerRefused]:
        """What was counted in seconds that are over."""
        past = [host for host, second in self._seconds.items() if second.number != int(now_s)]
        seconds = [self._seconds.pop(host) for host in past]
        return [replace(each.first, num_times=each.num_more) for each in seconds if each.num_more]

    def take_all(self) -> list[CallerRefused]:
        """What was counted so far."""
        return self.take_past(-1.0)


def _host(peer: str) -> str:
    """Without the port, which is another for each connection: `ipv4:127.0.0.1:4711`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
