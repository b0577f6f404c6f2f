"""Frames as JSON lines, for the live page and `splitserve top --json`."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_live.state import lack_word, state_word


class SharedLines:
    """Cache of encoded lines of the latest frames: a frame sent to several viewers is encoded once.

    A scheduler sends the same frame to all viewers at the same time, over one call for each viewer,
    as it authorizes each of them.
    """

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._lines: OrderedDict[bytes, bytes] = OrderedDict()

    def line(self, frame: live.WatchSchedulerResponse) -> bytes:
        """Returns `frame_line(frame)`, encoded once."""
        key = frame.SerializeToString()
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = frame_line(frame)
            if len(self._lines) > self._num_lines:
                self._lines.popitem(last=False)
        return line


def frame_line(frame: live.WatchSchedulerResponse) -> bytes:
    """Encodes a frame as one JSON line with a newline."""
    return json.dumps(_frame(frame), separators=(",", ":")).encode() + b"\n"


def _frame(frame: live.WatchSchedulerResponse) -> dict[str, Any]:
    return {
        "unix_ms": frame.unix_ms,
        "now_ms": frame.now_ms,
        "waiting": list(frame.waiting),
        "num_waiting": frame.num_waiting,
        "num_quarantined": frame.num_quarantined,
        "reasons": [_reason(reason) for reason in frame.reasons],
        "forgets": frame.forgets_requests,
        "requests": [_request(request) for request in frame.new_requests],
        "history": [_point(point) for point in frame.history],
        "ttft": _latency(frame.time_to_first_token),
        "executors": [_executor(executor) for executor in frame.executors],
    }


def _point(point: live.LivePoint) -> dict[str, Any]:
    return {
        "start_ms": point.start_ms,
        "tokens": point.num_tokens,
        "waiting": point.num_waiting,
        "ttft": _latency(point.time_to_first_token),
    }


def _latency(latency: live.LiveLatency) -> dict[str, int] | None:
    """Encodes a latency; None if it covers no request."""
    if not latency.count:
        return None
    return {"count": latency.count, "p50_us": latency.p50_us, "p99_us": latency.p99_us}


def _reason(reason: live.LiveReason) -> dict[str, Any]:
    return {
        "address": reason.address,
        "lack": lack_word(reason.lack),
        "needed": reason.num_needed,
        "free": reason.num_free,
    }


def _request(request: live.LiveRequest) -> dict[str, Any]:
    return {
        "number": request.number,
        "id": request.request_id,
        "tenant": request.tenant,
        "prompt": request.num_prompt_tokens,
        "stop_len": request.stop_len,
        "sequences": request.num_sequences,
        "priority": request.priority,
        "submitted_ms": request.submitted_ms,
    }


def _executor(executor: live.LiveExecutor) -> dict[str, Any]:
    return {
        "address": executor.address,
        # Beyond the integer range of JavaScript's numbers.
        "life": str(executor.life),
        "state": state_word(executor.state),
        "running": list(executor.running),
        "tokens": list(executor.num_tokens),
        "computed": list(executor.num_computed),
        "swapped": list(executor.swapped),
        "waiting": list(executor.waiting),
        "num_waiting": executor.num_waiting,
        "reason": _reason(executor.reason) if executor.reason.lack else None,
        "rows": executor.max_num_seqs,
        "in_flight": executor.num_in_flight,
        "num_steps": executor.num_steps,
        "preemptions": executor.num_preemptions,
        "steps": [_step(step) for step in executor.steps],
        "device": _pool(executor.device),
        "host": _pool(executor.host),
    }


def _pool(pool: live.LivePool) -> dict[str, Any]:
    return {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "changed": list(pool.changed),
        "states": list(pool.states),
        "holders": list(pool.holders),
    }


def _step(step: live.LiveStep) -> dict[str, Any]:
    return {
        "id": step.step_id,
        "sent_ms": step.sent_ms,
        "round_trip_us": step.round_trip_us,
        "compute_us": step.compute_us,
        "requests": list(step.rows),
        "kinds": list(step.kinds),
        "tokens": list(step.num_tokens),
        "num_rows": step.num_rows,
        "sampled": step.num_sampled,
        "out": step.num_swapped_out,
        "in": step.num_swapped_in,
        "copied": step.num_copied,
        "failed": step.failed,
    }
