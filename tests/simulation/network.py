"""A network between simulated processes: connections as TCP makes them, and what becomes of them.

Between two hosts there is a delay, and each direction can be cut: what is under way then waits, and
arrives in its order when the cut is over, unless somebody has given the connection up by then. An
end that gives up says nothing on a dead line: the other end learns of it when it sends something,
or by its own pings, as with keepalive of gRPC. How long those take is what
`tests/integration/test_silent_connections.py` measures on a real network.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any

from splitserve_rpc import KEEPALIVE_S, PING_TIMEOUT_S
from tests.simulation.virtual_loop import Process, VirtualLoop, current_process

# A lost packet is sent again after so long.
_RETRANSMISSION_S = 0.2
CONNECT_TIMEOUT_S = 20.0
_PING, _PONG = ("ping",), ("pong",)

Frame = tuple[Any, ...]


@dataclass(slots=True)
class Delays:
    """Seconds that a message takes: the least, and how much longer it may take by chance."""

    least_s: float = 0.0002
    jitter_s: float = 0.0003


class End:
    """One end of a connection. `on_frame` and `on_lost` are called in its process."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.is_open = True
        # Nothing that it sends gets anywhere, and nobody tells it.
        self.is_swallowed = False
        self.on_frame: Callable[[Frame], None] = lambda _frame: None
        self.on_lost: Callable[[str], None] = lambda _problem: None
        self.peer: End = self
        self._network = network
        self._on_the_way: deque[Frame] = deque()
        # Of these, how many would have arrived if the line were not cut.
        self._num_stalled = 0
        self._last_arrival_s = 0.0
        self._heard_at_s = network.loop.time()
        self._watch()

    def send(self, frame: Frame) -> None:
        """Sends towards the other end, after what was sent before."""
        if self.is_open and not self.is_swallowed:
            self._on_the_way.append(frame)
            delay_s = self._network.delay_s(self.process.host, self.peer.process.host)
            self._arrive_in(delay_s)

    def close(self, *, is_told: bool = True) -> None:
        """Lets go of it. `is_told`: the other end hears of it, after what was sent."""
        if self.is_open:
            if is_told:
                self.send(("reset", "Connection reset by peer"))
            self.is_open = False
            self._network.forget(self)

    def lose(self, problem: str) -> None:
        """The connection is gone, as this end sees it."""
        if self.is_open:
            self.is_open = False
            self._network.forget(self)
            self.on_lost(problem)

    def heal(self) -> None:
        """The way to the other end is open again."""
        for _ in range(self._num_stalled):
            self._arrive_in(_RETRANSMISSION_S)
        self._num_stalled = 0

    def _arrive_in(self, delay_s: float) -> None:
        loop = self._network.loop
        self._last_arrival_s = max(self._last_arrival_s, loop.time() + delay_s)
        # The wires are the world's, and what is read is the process's.
        loop.call_at(self._last_arrival_s, self._arrive, context=self._network.context)

    def _arrive(self) -> None:
        if self._num_stalled or self._network.is_cut(self.process.host, self.peer.process.host):
            self._num_stalled += 1
            return
        frame, peer = self._on_the_way.popleft(), self.peer
        self._network.loop.call_soon(peer.receive, frame, context=peer.process.context)

    def receive(self, frame: Frame) -> None:
        """What the other end sent is here."""
        if not self.is_open:
            if frame[0] != "reset" and not self._network.is_silent(self.process):
                self.is_open = True  # to say just this
                self.send(("reset", "Connection reset by peer"))
                self.is_open = False
            return
        self._heard_at_s = self._network.loop.time()
        match frame[0]:
            case "ping":
                self.send(_PONG)
            case "pong":
                pass
            case "reset":
                self.lose(frame[1])
            case _:
                self.on_frame(frame)
                self._network.arrived(self)

    def _watch(self) -> None:
        """Pings when nothing was heard for long; nothing heard then is the end of it."""
        if not self.is_open:
            return
        loop = self._network.loop
        silent_s = loop.time() - self._heard_at_s
        if silent_s >= KEEPALIVE_S + PING_TIMEOUT_S:
            self.lose("keepalive watchdog timeout")
            return
        if silent_s >= KEEPALIVE_S:
            self.send(_PING)
            at_s = self._heard_at_s + KEEPALIVE_S + PING_TIMEOUT_S
        else:
            at_s = self._heard_at_s + KEEPALIVE_S
        # Sums of seconds are not exact.
        at_s = max(at_s, loop.time()) + 0.001
        loop.call_at(at_s, self._watch, context=self.process.context)


class Network:
    """Hosts by name; who listens there; cuts and delays of each direction between two of them."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        # Of nobody's process.
        self.context = Context()
        self.delays: dict[tuple[str, str], Delays] = {}
        self._usual = Delays()
        self._cuts: set[tuple[str, str]] = set()
        # So many frames until the connection that brings the last of them breaks.
        self._num_frames_left: dict[tuple[str, str], int] = {}
        self._silent: set[Process] = set()
        self._listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self._ends: dict[End, None] = {}
        loop.on_connect = self._knock

    # -- connections -----------------------------------------------------------------------------

    def listen(self, address: str, accept: Callable[[End], None], process: Process) -> None:
        """Hands connections to `address` to `accept`."""
        self._listeners[address] = (process, accept)

    def stop_listening(self, address: str, process: Process) -> None:
        """Connections to `address` are refused, unless somebody else listens there by now."""
        listener = self._listeners.get(address)
        if listener is not None and listener[0] is process:
            del self._listeners[address]

    def connect(self, process: Process, address: str, answer: Callable[[End | str], None]) -> None:
        """Tells `answer` the end of a new connection, or why there is none."""
        Dial(self, process, address, answer)

    async def _knock(self, address: str) -> None:
        """As connecting a socket: the kernel of the other machine answers. Raises OSError."""
        here, host = current_process().host, address.rpartition(":")[0]
        until_s = self.loop.time() + CONNECT_TIMEOUT_S
        await asyncio.sleep(self.delay_s(here, host) + self.delay_s(host, here))
        while not self._is_reached(here, host, address):
            if self.loop.time() >= until_s:
                raise TimeoutError(f"connection to {address} timed out")
            await asyncio.sleep(_RETRANSMISSION_S)
        if address not in self._listeners:
            raise ConnectionRefusedError(f"connection to {address} refused")

    def _is_reached(self, here: str, host: str, address: str) -> bool:
        is_cut = self.is_cut(here, host) or self.is_cut(host, here)
        return not is_cut and self.is_answering(address)

    def link(self, process: Process, address: str) -> End | None:
        """Both ends of a connection to who listens at `address`; None if nobody does."""
        if address not in self._listeners or process.is_dead:
            return None
        listener, accept = self._listeners[address]
        near, far = End(self, process), listener.call(End, self, listener)
        near.peer, far.peer = far, near
        self._ends[near] = self._ends[far] = None
        self.loop.call_soon(accept, far, context=listener.context)
        return near

    def forget(self, end: End) -> None:
        """It is not to be lost any more."""
        self._ends.pop(end, None)

    # -- what goes wrong -------------------------------------------------------------------------

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing that `sender` sends gets to `receiver`, until it is healed."""
        self._cuts.add((sender, receiver))

    def heal(self, sender: str, receiver: str) -> None:
        """What waited since the cut arrives."""
        if (sender, receiver) in self._cuts:
            self._cuts.discard((sender, receiver))
            for end in list(self._ends):
                if end.process.host == sender and end.peer.process.host == receiver:
                    end.heal()

    def heal_all(self) -> None:
        """No cuts, no long delays, and nothing will break."""
        self._num_frames_left.clear()
        for sender, receiver in sorted(self._cuts):
            self.heal(sender, receiver)
        self.delays.clear()

    def reset(self, host: str, other: str, *, is_told: bool) -> int:
        """Resets all connections between two hosts; returns how many.

        `is_told` False: `host` alone notices; what it sent before may still arrive.
        """
        hit = [
            end
            for end in list(self._ends)
            if end.process.host == host and end.peer.process.host == other
        ]
        for end in hit:
            self._lose(end)
            if is_told:
                self._lose(end.peer)
        return len(hit)

    def swallow(self, sender: str, receiver: str) -> int:
        """What `sender` says over connections that there are now is lost; returns how many.

        As where a router has forgotten them. New ones are not concerned.
        """
        hit = [
            end
            for end in self._ends
            if end.process.host == sender and end.peer.process.host == receiver
        ]
        for end in hit:
            end.is_swallowed = True
        return len(hit)

    def reset_after(self, sender: str, receiver: str, num_frames: int) -> None:
        """Resets the connection that brings the last of so many frames, once that is there.

        So what is said at one moment is heard in part, which no `reset` at some time hits.
        """
        self._num_frames_left[sender, receiver] = num_frames

    def arrived(self, end: End) -> None:
        """An end has got a frame."""
        way = end.peer.process.host, end.process.host
        if way in self._num_frames_left:
            self._num_frames_left[way] -= 1
            if not self._num_frames_left[way]:
                del self._num_frames_left[way]
                self._lose(end.peer)
                end.lose("Connection reset by peer")

    def _lose(self, end: End) -> None:
        self.loop.call_soon(end.lose, "Connection reset by peer", context=end.process.context)

    def let_go(self, process: Process, *, is_silent: bool) -> None:
        """All connections of `process` end. `is_silent`: its machine is gone, nobody is told."""
        if is_silent:
            self._silent.add(process)
        for end in [end for end in self._ends if end.process is process]:
            end.close(is_told=not is_silent)
        for address, (listener, _) in list(self._listeners.items()):
            if listener is process and not is_silent:
                del self._listeners[address]

    def is_silent(self, process: Process) -> bool:
        """Whether nothing answers for it, not even a kernel."""
        return process in self._silent

    def is_cut(self, sender: str, receiver: str) -> bool:
        """Whether what is sent waits."""
        return (sender, receiver) in self._cuts

    def is_answering(self, address: str) -> bool:
        """Whether a connection to `address` would be accepted or refused, and not just wait."""
        listener = self._listeners.get(address)
        return listener is None or listener[0] not in self._silent

    def delay_s(self, sender: str, receiver: str) -> float:
        """Of one message."""
        delays = self.delays.get((sender, receiver), self._usual)
        return delays.least_s + delays.jitter_s * self.random.random()


class Dial:
    """One attempt to connect: a packet there and one back, sent again while the line is cut.

    It is a connection when the other process has said so, not only its kernel.
    """

    def __init__(
        self, network: Network, process: Process, address: str, answer: Callable[[End | str], None]
    ) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._answer = answer
        self._host = address.rpartition(":")[0]
        self._is_over = False
        self._end: End | None = None
        loop = network.loop
        loop.call_later(CONNECT_TIMEOUT_S, self._time_out, context=process.context)
        loop.call_soon(self._try, context=network.context)

    def _try(self) -> None:
        network, here = self._network, self._process.host
        if self._is_over:
            return
        is_open = network.is_answering(self._address) and not (
            network.is_cut(here, self._host) or network.is_cut(self._host, here)
        )
        if is_open:
            delay_s = network.delay_s(here, self._host) + network.delay_s(self._host, here)
            network.loop.call_later(delay_s, self._arrive, context=self._process.context)
        else:
            network.loop.call_later(_RETRANSMISSION_S, self._try, context=network.context)

    def _arrive(self) -> None:
        if self._is_over:
            return
        self._end = self._network.link(self._process, self._address)
        if self._end is None:
            self._finish(f"connection to {self._address} refused")
        else:
            self._end.on_frame = lambda _settings: self._finish(self._end)
            self._end.on_lost = self._finish

    def _time_out(self) -> None:
        if not self._is_over and self._end is not None:
            self._end.close()
        self._finish(f"connection to {self._address} timed out")

    def _finish(self, answer: End | str | None) -> None:
        assert answer is not None
        if not self._is_over:
            self._is_over = True
            self._answer(answer)
