"""Refusals, few enough that a flood of them fills no disk and hides nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.audit.events import CallerRefused, ExecutorRefused, RequestRefused

# Peers, or callers with a reason, that are told apart in one second; all further ones are one.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused | RequestRefused


@dataclass(slots=True)
class _Second:
    first: Refusal
    number: int
    num_more: int = 0


class RefusedPeers:
    """Lets the first refusal of a peer, or of a caller for a reason, in a second pass.

    Counts the rest.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[object, ...], _Second] = {}

    def add(self, event: Refusal, now_s: float) -> Refusal | None:
        """What is to be written now. Call `take_past` before."""
        key = _key(event)
        if key not in self._seconds and len(self._seconds) >= MAX_PEERS:
            key, event = (type(event), OTHERS), _of_others(event)
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


def _key(event: Refusal) -> tuple[object, ...]:
    if isinstance(event, RequestRefused):
        return (RequestRefused, event.caller, event.reason, event.limit)
    return (type(event), _host(event.peer))


def _of_others(event: Refusal) -> Refusal:
    if isinstance(event, RequestRefused):
        return replace(event, caller=OTHERS, tenant="", request_id="")
    return replace(event, peer=OTHERS)


def _host(peer: str) -> str:
    """Without the port, which is another for each connection: `ipv4:127.0.0.1:4711`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
