"""A device on the CPU that is late: what it was asked is seen on the host only some time after.

Operators run when they are called, in the order of the calls, as on one stream of a device. Late
are its events, and what is copied to the host: until then the copy is rubbish.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor_service.model import LoadedModel, MakeModel, torch_model
from executor_service.runner import CacheConfig, ModelRunner, build_runner

# As a float it is NaN, as a token id nothing.
RUBBISH = 0x7FFFFFFF
_PATIENCE_S = 240.0


@dataclass(slots=True)
class _Stream:
    """`num_asked`, `num_done`: operations. `copies`: what arrives with which operation.

    `ends`: of steps that sample, the operations at whose end they are over.
    """

    num_asked: int = 0
    num_done: int = 0
    copies: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class LateStreams:
    """DeviceStreams whose work is done when the test says so, or when the host waits for it.

    `is_held`: then it is not done by waiting; whoever waits goes on when the test says so.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self._is_held = is_held
        self._changed = threading.Condition()
        self._compute, self._swap = _Stream(), _Stream()
        self._current = self._compute
        # How often the host waited for what was not done, and asked for a copy.
        self.num_waits = self.num_copies = 0

    # -- DeviceStreams -------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        return False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        self._current = self._swap
        yield
        self._current = self._compute

    def swap_after_compute(self) -> None:
        pass

    def compute_after_swap(self) -> None:
        pass

    def start_timer(self) -> LateTimer:
        return LateTimer(self, self._current)

    def mark(self) -> LateTimer:
        mark = LateTimer(self, self._current)
        mark.pass_now()
        return mark

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def copy_to_device(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        with self._changed:
            copy = torch.full_like(tensor, RUBBISH, dtype=torch.int32)
            stream = self._current
            stream.num_asked += 1
            self.num_copies += 1
            stream.copies.append((stream.num_asked, copy, tensor.clone().view(torch.int32)))
            self._changed.notify_all()
            return copy

    # -- the device's side -----------------------------------------------------------------------

    def advance(self, num_operations: int | None = None, *, swap: bool = False) -> None:
        """Executes the next operations of a stream; None: all of them."""
        stream = self._swap if swap else self._compute
        with self._changed:
            self._do(stream, num_operations)

    def release(self) -> None:
        """Lets all be done that is asked for, from now on as soon as the host waits."""
        with self._changed:
            self._is_held = False
        self.advance()
        self.advance(swap=True)

    def wait_until(self, stream: _Stream, number: int) -> None:
        """The host waits."""
        with self._changed:
            if stream.num_done < number:
                self.num_waits += 1
            if not self._is_held:
                self._do(stream, number - stream.num_done)
            is_over = self._changed.wait_for(lambda: stream.num_done >= number, _PATIENCE_S)
            assert is_over, "the test forgot to say that it is over"

    def wait_for_steps(self, number: int) -> None:
        """Waits until this many sampling steps have begun and not ended."""
        with self._changed:
            has_begun = self._changed.wait_for(
                lambda: len(self._unfinished()) >= number, _PATIENCE_S
            )
            assert has_begun, "the step did not begin"

    def finish_step(self) -> None:
        """Does what the oldest step that samples has asked of the compute stream."""
        with self._changed:
            self._do(self._compute, self._unfinished()[0] - self._compute.num_done)

    def end_timer(self, stream: _Stream) -> int:
        """Returns the operation at whose end it ends."""
        with self._changed:
            is_end = bool(stream.copies) and stream.copies[-1][0] == stream.num_asked
            stream.num_asked += 1
            if is_end:
                stream.ends.append(stream.num_asked)
            self._changed.notify_all()
            return stream.num_asked

    def _unfinished(self) -> list[int]:
        return [end for end in self._compute.ends if end > self._compute.num_done]

    @torch.inference_mode()
    def _do(self, stream: _Stream, num_operations: int | None) -> None:
        rest = stream.num_asked - stream.num_done
        stream.num_done += rest if num_operations is None else max(0, min(num_operations, rest))
        while stream.copies and stream.copies[0][0] <= stream.num_done:
            _, copy, content = stream.copies.pop(0)
            copy.copy_(content)
        self._changed.notify_all()


class LateTimer:
    """See executor_service.device.streams.Timer."""

    def __init__(self, streams: LateStreams, stream: _Stream) -> None:
        self._streams = streams
        self._stream = stream
        self._number = 0

    def stop(self) -> None:
        self._number = self._streams.end_timer(self._stream)

    def pass_now(self) -> None:
        """Ends behind what its stream was asked so far, as no operation of its own."""
        self._number = self._stream.num_asked

    @property
    def is_over(self) -> bool:
        return self._stream.num_done >= self._number

    def wait(self) -> None:
        self._streams.wait_until(self._stream, self._number)

    def elapsed_us(self) -> int:
        self.wait()
        return 1


def late_runner(
    loaded: LoadedModel,
    cache_config: CacheConfig,
    streams: LateStreams,
    make_model: MakeModel = torch_model,
) -> ModelRunner:
    """A runner of `loaded` whose device is late."""
    cache = build_runner(loaded, cache_config).cache
    return ModelRunner(loaded, cache, make_model(loaded, cache), streams=streams)
