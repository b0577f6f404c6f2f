"""What compose_fleet.sh runs inside a container: streams without end, none of which may notice.

Each kind of stream is asked for once while nothing else happens; then all kinds run side by side,
again and again, until SIGTERM, and each has to bring what it brought at first. Half of them go to
the schedulers with our client, half to the gateway over HTTP, without any retry. Writes `running`
once there is something to compare with, `ended` for each stream, `wrong ...` for each that broke
or changed, and how many there were at the end; the exit code is 0 if none went wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from splitserve_client import BeamSearch, Client, Finish, SamplingParams, SplitserveError, Tokens

TIMEOUT_S = 600.0
# Long enough that streams are under way whatever is done to the containers.
NUM_TOKENS = 120
CLIENT_KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    "several": SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=80, ignore_eos=True),
    "beams": SamplingParams(beam_search=BeamSearch(2), max_tokens=40, ignore_eos=True),
    "scored": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        num_logprobs=1,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    ),
}
HTTP_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": NUM_TOKENS},
    "sampled": {"seed": 7, "max_tokens": NUM_TOKENS},
    "several": {"seed": 11, "n": 2, "max_tokens": 80},
    "penalties": {"seed": 13, "frequency_penalty": 0.5, "max_tokens": NUM_TOKENS},
}
PROMPT = "Once upon a time there was a dragon who "
# What a stream brought: of each of its sequences the tokens or the text, and how it ended.
Brought = dict[int, tuple[Any, ...]]
Source = Callable[[], Iterator[tuple[int, Any]]]


class StreamLost(Exception):
    """A stream that did not come to its end."""


class Load:
    """Runs streams, counts those that ended and those that went wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._num_ended = self._num_wrong = 0
        self._longest_pause_s = 0.0

    def stop(self) -> None:
        """No stream is begun any more; those that run come to their ends."""
        self._is_over.set()

    def run(self, sources: dict[str, Source]) -> bool:
        """All sources side by side until `stop`; True if no stream went wrong."""
        undisturbed = {name: self._read(source) for name, source in sources.items()}
        _write(f"running, {len(sources)} kinds")
        self._longest_pause_s = 0.0
        threads = [
            threading.Thread(target=self._repeat, args=(name, source, undisturbed[name]))
            for name, source in sources.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _write(
            f"{self._num_ended} streams, {self._num_wrong} lost or changed,"
            f" longest pause {self._longest_pause_s:.1f} s"
        )
        return self._num_wrong == 0 < self._num_ended

    def _repeat(self, name: str, source: Source, undisturbed: Brought) -> None:
        while not self._is_over.is_set():
            try:
                problem = "" if self._read(source) == undisturbed else "changed"
            except (SplitserveError, StreamLost, OSError, http.client.HTTPException) as error:
                problem = f"lost: {type(error).__name__}: {error}"
            with self._lock:
                self._num_ended += 1
                self._num_wrong += bool(problem)
                _write(f"wrong: {name} {problem}" if problem else f"ended: {name}")

    def _read(self, source: Source) -> Brought:
        brought: Brought = {}
        before = time.monotonic()
        for index, parts in source():
            brought[index] = (*brought.get(index, ()), *parts)
            now = time.monotonic()
            with self._lock:
                self._longest_pause_s = max(self._longest_pause_s, now - before)
            before = now
        return brought


def tokens_of(client: Client, params: SamplingParams, tag: int) -> Iterator[tuple[int, Any]]:
    """What our client streams: token ids, and at the end why, and how many."""
    finish = None
    for event in client.generate([tag, 7, *range(3, 20)], params, timeout_s=TIMEOUT_S):
        match event:
            case Tokens():
                yield event.index, event.token_ids
            case Finish():
                finish = event
    if finish is None:
        raise StreamLost("no finish")
    yield -1, (finish.reason, finish.usage.num_output_tokens)


def texts_of(gateway: str, options: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """What the gateway streams: the characters of texts, and at the end why, and how many."""
    connection = http.client.HTTPConnection(gateway, timeout=TIMEOUT_S)
    try:
        body = {
            "prompt": PROMPT,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body | options), headers)
        yield from _events_of(connection.getresponse())
    finally:
        connection.close()


def _events_of(response: http.client.HTTPResponse) -> Iterator[tuple[int, Any]]:
    if response.status != 200:
        raise StreamLost(f"status {response.status}: {response.read(500)!r}")
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(data)
        if "error" in event:
            raise StreamLost(event["error"].get("code"))
        for choice in event["choices"]:
            yield choice["index"], choice["text"]
            if choice["finish_reason"]:
                yield choice["index"], (choice["finish_reason"],)
        if event.get("usage"):
            yield -1, (event["usage"]["completion_tokens"],)
    raise StreamLost("no [DONE]")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs all kinds until SIGTERM; 0 if each stream brought what it had to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedulers", help="as splitserve generate --address takes them")
    parser.add_argument("gateway", help="host:port")
    options = parser.parse_args()
    load = Load()
    signal.signal(signal.SIGTERM, lambda *_: load.stop())
    with Client(options.schedulers) as client:
        sources: dict[str, Source] = {}
        for tag, (name, params) in enumerate(CLIENT_KINDS.items(), start=3):
            sources[f"client {name}"] = partial(tokens_of, client, params, tag)
        for name, kind in HTTP_KINDS.items():
            sources[f"gateway {name}"] = partial(texts_of, options.gateway, kind)
        return 0 if load.run(sources) else 1


if __name__ == "__main__":
    sys.exit(main())
