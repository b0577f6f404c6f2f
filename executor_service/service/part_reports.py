"""Parts of the result of a step, sent while its rows run on."""

from __future__ import annotations

import time
from collections.abc import Callable

from executor_service.service.answer_encoding import encode_part
from executor_service.steps import Int32Array, StepIdentity, TokenRuns
from splitserve.executor.v1 import executor_pb2 as pb

# Least time between two parts. People see no difference below it, and a small model on a CPU gets
# tokens in less time than a message takes from here to the client.
LEAST_INTERVAL_S = 0.005


class PartReports:
    """Turns the tokens that the rows of one step have got so far into parts of its result.

    The first tokens are sent at once, later ones at most every `LEAST_INTERVAL_S`. What is not sent
    is in the result of the step.
    """

    def __init__(
        self,
        identity: StepIdentity,
        send: Callable[[Callable[[], pb.StepResult]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reports on the step `identity`. `send` gets a function that encodes a part.

        `clock`: in seconds.
        """
        self._identity = identity
        self._send = send
        self._clock = clock
        self._num_sent: Int32Array | None = None
        self._sent_s = 0.0

    def report(self, runs: TokenRuns) -> None:
        """Sends the tokens of `runs` that were not sent before, unless it is too early.

        `runs`: all tokens that each row [R] has got so far. Raises what `send` raises.
        """
        now_s = self._clock()
        if self._num_sent is not None and now_s < self._sent_s + LEAST_INTERVAL_S:
            return
        part = runs if self._num_sent is None else runs.behind(self._num_sent)
        if not len(part.token_ids):
            return
        self._num_sent, self._sent_s = runs.counts, now_s
        self._send(lambda: encode_part(self._identity, part))
