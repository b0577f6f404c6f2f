"""The process from which `forked` forks: it imports modules once, and runs one in each child.

Its standard input is a socket. A request is four bytes, with the descriptors of the child's
standard streams and of a pipe; then so many bytes of JSON: the module, arguments, environment. The
answer is the pid. When the child ends, the pipe gets its exit code as text.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

LENGTH_BYTES = 4
# In the environment: the name of the mutant that is planted into processes of tests.
PLANTED = "PLANTED_MUTANT"
_NUM_STREAMS = 3


class _Child(Exception):
    """Request of a child; raised in it to leave the loop of the server."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request["module"])
        self.request = request


class _Server:
    """Forks and reaps children until its socket is closed."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._pipes: dict[int, int] = {}
        # Ctrl-C is for the children, as it is when they are started without this process.
        self._interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._woken, self._waking = os.pipe()
        for end in (self._woken, self._waking):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Raises _Child in each child. At the end no child is left."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._asking, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._asking in ready and not self._answer():
                    break
        for pid in self._pipes:
            os.kill(pid, signal.SIGKILL)

    def _answer(self) -> bool:
        length, descriptors, _, _ = socket.recv_fds(self._asking, LENGTH_BYTES, _NUM_STREAMS + 1)
        if not length:
            return False
        body = self._asking.recv(int.from_bytes(length), socket.MSG_WAITALL)
        *streams, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            self._become_child(streams, pipe)
            raise _Child(json.loads(body))
        self._pipes[pid] = pipe
        for descriptor in streams:
            os.close(descriptor)
        self._asking.sendall(pid.to_bytes(LENGTH_BYTES))
        return True

    def _become_child(self, streams: list[int], pipe: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._interrupt)
        self._asking.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for descriptor in (*streams, pipe, *self._pipes.values(), self._woken, self._waking):
            os.close(descriptor)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pipe = self._pipes.pop(ended[0])
                # Whoever does not ask any more has closed it.
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, b"%d" % os.waitstatus_to_exitcode(ended[1]))
                os.close(pipe)


def plant_fault() -> None:
    """Plants the mutant of this environment, if there is one. Nothing of ours is imported yet."""
    if name := os.environ.get(PLANTED):
        mutant = importlib.import_module("tests.mutants.mutant")
        mutant.plant(name, importlib.import_module("tests.mutants.mutants").MUTANTS[name])


def main() -> int:
    """Serves; in a child, runs what was asked for, and returns its exit code."""
    asking = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    plant_fault()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # Collections would touch, and so copy, the pages that all share.
    gc.collect()
    gc.freeze()
    try:
        _Server(asking).run()
    except _Child as child:
        request = child.request
    else:
        return 0
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    code: int = importlib.import_module(request["module"]).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
