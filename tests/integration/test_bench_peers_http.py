"""Tests of `benchmarks.peers http`: against servers of known streams, and on streams by hand."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks import peers_http
from benchmarks.http_load import Stream, encode, run_beside
from benchmarks.peers_http import Results, Server, latencies, peer_server, with_positions
from tests.support.bench import paced_server

_OURS = "splitserve"


def _paced(host: str) -> list[str]:
    port = host.rpartition(":")[2]
    return [sys.executable, "-m", paced_server.__name__, "--port", port]


@pytest.fixture
def host() -> str:
    """An address that is free, also for a process that does not share its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a model that no server of these tests loads."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"vocab_size": 1000, "max_position_embeddings": 64, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def _stream(*times_s: float, last_text: str = "a") -> Stream:
    texts = [*("a" for _ in times_s[1:]), last_text]
    choices = [{"text": text, "finish_reason": None} for text in texts]
    choices[-1]["finish_reason"] = "length"
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    return Stream(200, 10.0, list(times_s), "".join(f"data: {e}\n\n" for e in events).encode())


def test_latencies_are_those_of_all_streams() -> None:
    figures = latencies([_stream(10.1, 10.15, 10.2), _stream(10.3, 10.4)])
    assert figures["ttft_ms_p50"] == 200.0
    assert figures["gap_ms_p50"] == 50.0
    assert figures["gap_ms_p99"] == 99.0


def test_latencies_leave_out_a_chunk_that_only_says_why_it_ended() -> None:
    figures = latencies([_stream(10.1, 10.2, 10.2001, last_text="")])
    assert figures["gap_ms_p50"] == figures["gap_ms_p99"] == 100.0


def test_table_has_medians_of_rounds_and_of_their_ratios() -> None:
    results = Results("tiny")
    for ours, theirs in ((10.0, 20.0), (40.0, 50.0), (90.0, 100.0)):
        results.add("ours", "arrivals", {"tokens_per_s": ours})
        results.add("theirs", "arrivals", {"tokens_per_s": theirs})
    head, _, line = results.table(["ours", "theirs"])
    assert head.endswith("| ours | theirs | ours / theirs |")
    assert [cell.strip() for cell in line.strip("| ").split("|")] == [
        "arrivals",
        "tokens/s",
        "40.00 (10.00 to 90.00)",
        "50.00 (20.00 to 100.00)",
        "0.80",
    ]


def test_with_positions_links_weights_and_allows_more_positions(model: Path) -> None:
    with with_positions(model, 65) as copy:
        config = json.loads((copy / "config.json").read_text())
        assert config == {"vocab_size": 1000, "max_position_embeddings": 65, "hidden_size": 8}
        assert (copy / "model.safetensors").resolve() == model / "model.safetensors"
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 64
    with with_positions(model, 64) as same:
        assert same == model


def test_peer_server_is_refused_when_another_has_its_address(host: str) -> None:
    with (
        peer_server(_paced(host), host) as server,
        pytest.raises(RuntimeError, match="is taken"),
        peer_server(_paced(host), host),
    ):
        pass
    assert server.model == paced_server.MODEL


def test_peer_server_says_why_when_it_does_not_start(host: str) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="ended with status 3"), peer_server(command, host):
        pass


def test_run_beside_fails_when_a_stream_ends_first(host: str) -> None:
    request = encode("/v1/completions", {"model": "m", "max_tokens": 2}, host)
    with peer_server(_paced(host), host), pytest.raises(RuntimeError, match="has ended"):
        uvloop.run(run_beside(host, [request], request, 20))


def test_servers_take_turns_and_get_the_same_requests(
    host: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[Any, ...]] = []

    @contextmanager
    def paced_server_of_ours(*arguments: Any) -> Iterator[Server]:  # noqa: ANN401
        served.append(arguments)
        with peer_server(_paced(host), host) as server:
            yield server

    monkeypatch.setattr(peers_http, "our_server", paced_server_of_ours)
    # Answers of 2 tokens come at once; longer ones take as long as the server says.
    options = "--rounds 2 --streams 1 8 --requests-per-stream 1 --output-lengths 2 2"
    long = "--long-prompt 40 --decode-tokens 400"
    peer = f"--peer-url other=http://{host} --scheduler-options".split()
    command = " ".join(["--peer-server=other=" + _paced(host)[0], *_paced(host)[1:]])
    peers_http.main(
        ["--model", str(model), *options.split(), *long.split(), *peer, "--policy fcfs", command]
    )
    output = capsys.readouterr().out
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    rows = ["start", "streams: 1", "streams: 8", "arrivals", "long prompt", "beside a long prompt"]
    assert [(line["engine"], line["row"]) for line in lines] == 2 * [
        (engine, row) for engine in (_OURS, "other") for row in rows
    ]
    assert len({line["arrivals_per_s"] for line in lines if line["row"] == "arrivals"}) == 1
    beside = [line for line in lines if line["row"] == "long prompt"]
    # A token takes the server 10 to 40 ms, and an event has one to three.
    assert all(line["gap_ms_max"] >= 10 for line in beside)
    assert [list(each[3]) for each in served] == 2 * [["--policy", "fcfs"]]
    table = [line for line in output.splitlines() if line.startswith("| ")]
    assert table[0] == f"| tiny |  | {_OURS} | other | {_OURS} / other |"
    assert sum("long prompt | longest gap" in line for line in table) == 1
