"""What compose_test.sh runs inside a container: many streams, all of which have to finish.

Writes `running` once every executor has given tokens, and at the end how each stream ended.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import sys
import threading

import grpc

from splitserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

FINISHED = {"FINISH_REASON_LENGTH", "FINISH_REASON_MODEL_LENGTH"}
NUM_FIRST_TOKENS = 8


class Progress:
    """Counts streams with tokens; says so once there are enough."""

    def __init__(self, num_needed: int) -> None:
        self._left = num_needed
        self._lock = threading.Lock()

    def one_more(self) -> None:
        """One more stream runs."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                sys.stdout.write("running\n")
                sys.stdout.flush()


def run_stream(
    stub: scheduler_pb2_grpc.SchedulerServiceStub, index: int, max_tokens: int, progress: Progress
) -> str:
    """Generates one completion to its full length. Returns how it ended."""
    params = scheduler_pb2.SamplingParams(
        temperature=1.0, seed=index, max_tokens=max_tokens, ignore_eos=True
    )
    request = scheduler_pb2.GenerateRequest(
        prompt_token_ids=range(1, 5 + index), sampling_params=params
    )
    num_tokens, reason = 0, "none"
    for response in stub.Generate(request, timeout=600):
        before = num_tokens
        num_tokens += len(response.tokens.token_ids)
        if before < NUM_FIRST_TOKENS <= num_tokens:
            progress.one_more()
        if response.HasField("finish"):
            reason = scheduler_pb2.FinishReason.Name(response.finish.reason)
            if response.finish.usage.num_output_tokens != num_tokens:
                reason = f"{num_tokens} tokens of {response.finish.usage.num_output_tokens}"
    return reason


def main() -> int:
    """Runs all streams; 0 if each of them finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--running", type=int, default=4, help="streams with tokens to wait for")
    options = parser.parse_args()
    progress = Progress(options.running)
    with grpc.insecure_channel(options.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with concurrent.futures.ThreadPoolExecutor(options.streams) as pool:
            ends = [
                pool.submit(run_stream, stub, index, options.max_tokens, progress)
                for index in range(options.streams)
            ]
            reasons = collections.Counter(end.result() for end in ends)
    sys.stdout.write(f"ended: {dict(reasons)}\n")
    return 0 if reasons.keys() <= FINISHED else 1


if __name__ == "__main__":
    sys.exit(main())
