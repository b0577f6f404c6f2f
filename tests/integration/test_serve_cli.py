"""Tests `splitserve serve` as a user runs it: real processes, the bundled model."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaForCausalLM

from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from tests.support.models.gguf_writer import Setting, round_matrices, write_gguf
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import children_take_sigint
from tests.support.processes.patience import PATIENCE_S

_COMMAND = [sys.executable, "-m", "splitserve_cli"]
_START_S = PATIENCE_S
_STOP_S = PATIENCE_S
# What is clear without loading anything is to be said within seconds; of a machine with other work.
_EARLY_S = PATIENCE_S
_PAUSE_S = 0.05


def environ() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SPLITSERVE_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


def run_command(*arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Serve:
    """A running `splitserve serve`, and what it has written so far on both streams."""

    def __init__(self, *arguments: str) -> None:
        self.address = reserve_address()
        self.http = reserve_address()
        self.output = ""
        self._chunks: queue.Queue[bytes] = queue.Queue()
        small = ["--num-device-blocks", "128", "--threads", "1"]
        self.process = subprocess.Popen(
            [*_COMMAND, "serve", "--listen", self.address, "--http", self.http, *small, *arguments],
            env=environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Its children stop with it, and then the stream that all of them write to ends.
        self.process.kill()
        self.process.wait()
        self._reader.join(_STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 65536):
            self._chunks.put(chunk)
        self._chunks.put(b"")

    def read_until(self, text: str, timeout_s: float = _START_S) -> None:
        """Reads on until `text` has come since the last call."""
        start = len(self.output)
        deadline = time.monotonic() + timeout_s
        while text not in self.output[start:]:
            try:
                chunk = self._chunks.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} in time in:\n{self.output}") from None
            assert chunk, f"it ended without {text!r}:\n{self.output}"
            self.output += chunk.decode()

    def read_rest(self) -> str:
        """Reads until nobody can write any more."""
        while chunk := self._chunks.get(timeout=_STOP_S):
            self.output += chunk.decode()
        return self.output

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def wait_for_children(self, count: int) -> list[psutil.Process]:
        deadline = time.monotonic() + _EARLY_S
        while len(children := self.children()) < count:
            assert time.monotonic() < deadline, f"{len(children)} of {count} processes"
            time.sleep(_PAUSE_S)
        return children


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_STOP_S)
    assert alive == []


@pytest.fixture(scope="module")
def start_or_share() -> Iterator[Callable[[], Serve]]:
    with ExitStack() as stack:
        started: list[Serve] = []

        def start() -> Serve:
            if not started or started[-1].process.poll() is not None:
                started.append(stack.enter_context(Serve()))
                started[-1].read_until("Ctrl-C stops the server.")
            return started[-1]

        yield start


@pytest.fixture
def serve(start_or_share: Callable[[], Serve]) -> Serve:
    """One that serves. A test may kill it: the next gets another."""
    return start_or_share()


def test_serve_streams_a_first_completion_when_it_is_ready(serve: Serve) -> None:
    head, _, rest = serve.output.partition("> Tell me a story about a fox.\n")

    assert f"ready at {serve.address}" in head
    assert len(rest.partition("From another terminal:")[0].strip()) > 10


def test_info_shows_the_executor_when_the_server_runs(serve: Serve) -> None:
    done = run_command("info", "--json", "--address", serve.address)

    assert done.returncode == 0, done.stderr
    (executor,) = json.loads(done.stdout)["executors"]
    assert executor["connected"] is True
    assert executor["num_device_blocks"] == 128


def test_nobody_else_can_register_as_an_executor(serve: Serve) -> None:
    with grpc.insecure_channel(serve.address) as channel:
        registry = registry_pb2_grpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            registry.Register(registry_pb2.RegisterRequest(), timeout=_EARLY_S)

    assert refusal.value.details() == "the cluster token is missing or wrong"


def test_generate_repeats_its_text_with_the_same_seed(serve: Serve) -> None:
    arguments = ["--address", serve.address, "--max-tokens=12", "--seed=5", "--json", "A fox?"]
    first, second = (run_command("generate", *arguments) for _ in range(2))

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert json.loads(first.stdout)["text"] == json.loads(second.stdout)["text"] != ""


def write_byte_model(path: Path) -> Any:  # noqa: ANN401
    """Writes a random model whose tokens are bytes as a GGUF file of 8-bit blocks.

    Returns the model of `transformers` with the same weights.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, "he", "<|end|>"]
    sizes = {"vocab_size": len(tokens), "hidden_size": 64, "intermediate_size": 128}
    plain = make_tiny_model("llama", path.parent / "plain", overrides=sizes)
    model: Any = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32)
    round_matrices(model, "Q8_0")
    tokenizer: dict[str, Setting] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": [*([1] * (len(tokens) - 1)), 3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    write_gguf(path, model, "llama", tokenizer, type_name="Q8_0")
    return model.eval()


def test_serve_answers_as_transformers_does_when_the_model_is_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes-q8_0.gguf"
    model = write_byte_model(path)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    prompt = [symbols.index(symbol) for symbol in "AĠfox?"]
    with torch.inference_mode():
        for _ in range(20):
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            prompt.append(int(logits.argmax()))

    with Serve("--model", str(path), "--dtype", "float32") as own:
        own.read_until("Ctrl-C stops the server.")
        info = run_command("info", "--address", own.address)
        arguments = ["--temperature=0", "--ignore-eos", "--max-tokens=20", "--json", "A fox?"]
        done = run_command("generate", "--address", own.address, *arguments)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == prompt[-20:]
    assert "model: bytes-q8_0 (float32 from gguf, digest " in info.stdout


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_serve_refuses_to_start_when_a_port_is_in_use(serve: Serve, flag: str) -> None:
    free = {"--listen": reserve_address(), "--http": reserve_address()}
    taken = {"--listen": serve.address, "--http": serve.http}[flag]
    addresses = free | {flag: taken}
    done = run_command("serve", *(f"{name}={each}" for name, each in addresses.items()))

    assert done.returncode == 1
    assert done.stderr == f"splitserve serve: cannot listen on {taken}: the port is in use\n"


def test_serve_answers_the_curl_line_that_it_proposes(serve: Serve) -> None:
    _, found, rest = serve.output.partition("  curl ")
    assert found
    command = "curl --silent " + " ".join(rest.splitlines()[:2]).replace("\\ ", "")

    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert json.loads(done.stdout)["choices"][0]["text"]


def test_serve_starts_the_gateway_again_when_it_was_killed(serve: Serve) -> None:
    (gateway,) = (c for c in serve.children() if "splitserve_gateway" in c.cmdline())
    gateway.kill()

    serve.read_until("the gateway ended (killed by SIGKILL); starting it again")
    page = re.search(r"The live page is at (\S+)", serve.output)
    assert page is not None
    # Where it is did not change hands, so who asks meanwhile waits.
    with urllib.request.urlopen(page[1], timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def test_serve_starts_an_executor_again_when_it_was_killed(serve: Serve) -> None:
    (executor,) = (c for c in serve.children() if "executor_service" in c.cmdline())
    executor.kill()

    serve.read_until("executor 1 ended (killed by SIGKILL); starting it again")
    # Waits at the scheduler until the new executor has registered.
    done = run_command("generate", "--address", serve.address, "--max-tokens=3", "A fox?")

    assert done.returncode == 0, done.stderr


def test_generate_goes_on_when_the_scheduler_is_killed(serve: Serve) -> None:
    arguments = ["--address", serve.address, "--seed=4", "--ignore-eos", "--max-tokens=100"]
    command = ["generate", *arguments, "--json", "A fox?"]
    expected = json.loads(run_command(*command).stdout)
    (scheduler,) = (c for c in serve.children() if "scheduler_service" in c.cmdline())

    token_ids: list[int] = []
    with subprocess.Popen(
        [*_COMMAND, *command, "--stream"], env=environ(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            token_ids.extend(json.loads(line).get("token_ids", []))
            # A line may bring several.
            if len(token_ids) >= 10 and scheduler.is_running():
                scheduler.kill()
                scheduler.wait()
        assert process.wait(_STOP_S) == 0

    serve.read_until("the scheduler ended (killed by SIGKILL); starting it again")
    assert token_ids == expected["token_ids"]


def test_serve_leaves_no_orphan_when_it_is_killed(serve: Serve) -> None:
    children = serve.wait_for_children(3)

    serve.process.kill()

    assert_gone([*children, psutil.Process(serve.process.pid)])


def test_serve_asks_for_the_token_and_stops_everything_when_interrupted(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of the operators")
    with children_take_sigint():
        started = Serve("--no-demo", "--num-executors=2", f"--cluster-token-file={token}")
    with started as serve:
        serve.read_until("Ctrl-C stops the server.")
        info = ["info", "--address", serve.address]
        refused = run_command(*info)
        shown = run_command(*info, "--cluster-token-file", str(token))
        assert "the cluster token is missing or wrong" in refused.stderr
        assert "connected" in shown.stdout
        children = serve.wait_for_children(4)

        serve.process.send_signal(signal.SIGINT)

        assert serve.process.wait(_STOP_S) == 0
        assert_gone(children)
        assert "Traceback" not in serve.read_rest()


def test_serve_stops_everything_when_terminated_while_loading() -> None:
    with Serve() as serve:
        children = serve.wait_for_children(3)

        serve.process.terminate()

        assert serve.process.wait(_STOP_S) == 0
        assert_gone(children)


def test_serve_leaves_no_orphan_when_it_is_killed_while_loading() -> None:
    with Serve("--no-demo") as serve:
        children = serve.wait_for_children(3)

        serve.process.kill()

        assert_gone(children)


def test_serve_refuses_to_start_when_the_model_directory_is_missing(tmp_path: Path) -> None:
    model = tmp_path / "missing"

    done = run_command("serve", "--model", str(model), timeout_s=_EARLY_S)

    assert done.returncode == 1
    assert done.stderr == f"splitserve serve: --model {model}: no such directory\n"


def test_serve_shows_why_an_executor_could_not_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00")

    with Serve("--model", str(tmp_path)) as serve:
        children = serve.wait_for_children(3)
        assert serve.process.wait(_START_S) == 1
        output = serve.read_rest()
        assert_gone(children)

    assert "model.safetensors: truncated" in output
    assert "executor 1 ended before the model was served (exit code " in output
    assert "Traceback" not in output
