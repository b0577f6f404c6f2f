"""`splitserve info`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from splitserve_cli.main import main
from splitserve_rpc import Access, ClusterIdentity, RunningServer, ServerSecurity, bind_server
from tests.support.fakes.running_schedulers import FakeServer


def test_info_shows_model_and_pools_when_an_executor_is_there(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_ADDRESS", server.address)

    assert main(["info"]) == 0

    text = capsys.readouterr().out
    assert "model: fake (float32" in text
    heading, row = text.splitlines()[-3:-1]
    assert "FREE BLOCKS" in heading
    assert row.split("  ")[0] == "127.0.0.1:9"
    for cell in ("connected", "fake code", "60 of 64", "17", "30 of 32"):
        assert cell in row
    last = "requests waiting for an executor: 2, 1 of them fit no registered executor"
    assert text.splitlines()[-1] == last


def test_info_shows_what_the_model_recommends_when_it_does(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.default_sampling_params = scheduler_pb2.SamplingParams(temperature=0.5, top_k=9)

    assert main(["info", "--address", server.address]) == 0
    assert "recommended sampling parameters: temperature 0.5, top_k 9\n" in capsys.readouterr().out

    assert main(["info", "--json", "--address", server.address]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["default_sampling_params"] == {"temperature": 0.5, "top_k": 9}


def test_info_shows_the_format_of_the_checkpoint_when_it_is_quantised(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.quantization = "gguf"

    assert main(["info", "--address", server.address]) == 0
    assert "model: fake (float32 from gguf, digest " in capsys.readouterr().out

    assert main(["info", "--json", "--address", server.address]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["quantization"] == "gguf"


def test_info_says_which_executor_computes_slowly_and_why(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.slow_compute_reason = "there is no C++ compiler\x1b[2J"

    assert main(["info", "--address", server.address]) == 0

    line = r"127.0.0.1:9 computes slowly: there is no C++ compiler\x1b[2J"
    assert line in capsys.readouterr().out.splitlines()


def test_info_escapes_terminal_controls_in_names(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.name = "model: a\n\x1b[2Jforged\u202e"

    assert main(["info", "--address", server.address]) == 0

    assert capsys.readouterr().out.startswith(r"model: model: a\n\x1b[2Jforged\u202e (float32")


def test_info_writes_one_object_when_json_is_asked_for(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json", "--address", server.address]) == 0

    content = json.loads(capsys.readouterr().out)
    assert content["model"]["name"] == "fake"
    (executor,) = content["executors"]
    assert (executor["compute"], executor["slow_compute_reason"]) == ("fake code", "")
    assert (executor["connected"], executor["num_free_device_blocks"]) == (True, 60)
    assert (executor["num_swapped_requests"], executor["num_free_host_blocks"]) == (3, 30)
    assert executor["num_cached_device_blocks"] == 17
    assert (content["num_unassigned_requests"], content["num_unfitting_requests"]) == (2, 1)


TOKEN = "a secret of all of them"


@pytest.fixture
def cluster() -> Iterator[FakeServer]:
    """Asks operators for the token."""
    server = FakeServer(ServerSecurity(Access(ClusterIdentity(token=TOKEN))))
    yield server
    server.close()


@pytest.fixture
def clients_address(cluster: FakeServer) -> Iterator[str]:
    """Of the same scheduler, where it knows nothing of executors."""

    async def start() -> RunningServer:
        running = bind_server("127.0.0.1:0", ())
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(cluster.fake, running.server)
        await running.server.start()
        return running

    running = cluster.run(start())
    yield f"127.0.0.1:{running.port}"
    cluster.run(running.server.stop(None))


def test_info_sends_the_cluster_token_when_given(
    cluster: FakeServer,
    clients_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    argv = ["info", "--address", clients_address, "--cluster-address", cluster.address]

    assert main(argv) == 1
    assert capsys.readouterr().err.endswith("[CALLER_NOT_ALLOWED]\n")
    assert main([*argv, "--cluster-token-file", str(path)]) == 0
    monkeypatch.setenv("SPLITSERVE_CLUSTER_TOKEN_FILE", str(path))
    assert main(argv) == 0


def test_info_fails_in_one_line_when_token_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    assert main(["info", "--cluster-token-file", str(path)]) == 1
    problem = f"--cluster-token-file {path}: No such file or directory"
    assert capsys.readouterr().err == f"splitserve info: {problem}\n"
