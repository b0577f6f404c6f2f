"""Tests who joins: nothing is believed before the executor itself has said it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any

import pytest

from executor_service.service import encode_info
from scheduler_service.callers import Admission
from scheduler_service.config import ClusterConfig, SchedulerServiceConfig
from scheduler_service.driver import Driver
from scheduler_service.executors import (
    FACTOR,
    FIRST_LENIENCE,
    MAX_PENDING_JOINS,
    ExecutorLost,
    LinkConfig,
    Tasks,
    check_executor_info,
    core_config,
    epoch_for,
)
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.engine.planning import check_request
from scheduler_service.scheduler.values import (
    PolicyConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
)
from scheduler_service.streams import GenerateStream, RequestSink
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from splitserve_options import options
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info
from tests.support.core.machines import VOCAB_SIZE, BurstLink, Machine

ADDRESS = "executor:1"
CONFIG = ClusterConfig()


class Network:
    """Links to machines by address; where there is none, `answer` says what comes of asking."""

    def __init__(self, *machines: Machine, config: ClusterConfig = CONFIG) -> None:
        self.machines = {machine.address: machine for machine in machines}
        self.links: list[NetworkLink] = []
        self.held: asyncio.Event | None = None
        # For how long executors have been in a step.
        self.step_running_ms = 0
        self.cluster = Driver(config, 7, lambda: None, now_ns=lambda: 0, connect=self.connect)

    def connect(self, info: pb.ExecutorInfo, _config: LinkConfig) -> NetworkLink:
        machine = self.machines.get(info.address)
        self.links.append(NetworkLink(self, machine or Machine(info.address), info))
        return self.links[-1]


class NetworkLink(BurstLink):
    """Nobody answers where no machine is; where `held` is set, not before that."""

    def __init__(self, network: Network, machine: Machine, info: pb.ExecutorInfo) -> None:
        super().__init__(machine, info)
        self._network = network
        self.is_closed = False

    async def get_info(self, timeout_s: float) -> pb.ExecutorInfo:
        if self._network.held is not None:
            await self._network.held.wait()
        if self.info.address not in self._network.machines:
            raise ExecutorLost("UNAVAILABLE: nobody there")
        info = await super().get_info(timeout_s)
        info.step_running_ms = self._network.step_running_ms
        return info

    async def close(self) -> None:
        self.is_closed = True


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def info_of(machine: Machine, change: Callable[[pb.ExecutorInfo], None]) -> pb.ExecutorInfo:
    info = machine.info
    change(info)
    return info


def _take_audio(info: pb.ExecutorInfo) -> None:
    """Makes the model one of speech, with 30 seconds of 80 mel bins."""
    info.features.append(pb.FEATURE_CROSS_ATTENTION)
    info.model.encoder.max_tokens = 1500
    info.model.encoder.audio.CopyFrom(
        pb.AudioInfo(
            num_mel_bins=80,
            num_frames=3000,
            num_positions=1500,
            sampling_rate=16_000,
            hop_length=160,
            fft_length=400,
        )
    )


def test_step_takes_no_more_features_than_half_a_message_holds() -> None:
    info = Machine(ADDRESS).info
    _take_audio(info)
    info.limits.max_message_bytes = 6_000_000
    config = core_config(info, ClusterConfig(policies=PolicyConfig(max_num_encoder_tokens=10_000)))
    assert (config.num_encoder_features, config.max_encoder_tokens) == (240_000, 1500)
    assert config.max_num_encoder_tokens == 3 * 1500


async def test_model_is_that_of_executors_that_answer() -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    dead = Machine("nobody:1").info
    dead.model.digest, dead.model.max_model_len_tokens = "e" * 64, 3

    await network.cluster.join(dead)
    assert network.cluster.served.model is None
    await network.cluster.join(machine.info)
    await turns()
    await network.cluster.join(info_of(Machine("nobody:1"), lambda info: None))

    assert network.cluster.served.model == machine.info.model
    assert network.cluster.served.max_model_len == 96
    assert [link.is_closed for link in network.links] == [True, False, True]
    await network.cluster.drain(0)


def set_path(info: pb.ExecutorInfo, path: str, value: object) -> None:
    """Sets a field, or one of a message in `info`: `model.digest`."""
    *parents, name = path.split(".")
    target: Any = reduce(getattr, parents, info)
    if isinstance(value, list):
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.digest", "e" * 64),
        ("model.max_model_len_tokens", 3),
        ("num_device_blocks", 2**20),
        ("executor_epoch", 2**40),
    ],
)
async def test_living_executor_keeps_its_address(path: str, value: object) -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    if path == "executor_epoch":
        await network.cluster.join(machine.info)
        await turns()
    known = network.cluster.executors

    with pytest.raises(DomainError) as refusal:
        await network.cluster.join(info_of(machine, lambda info: set_path(info, path, value)))

    assert refusal.value.reason == "EXECUTOR_MISMATCH"
    assert f"GetInfo at {ADDRESS} reports" in refusal.value.message
    assert network.cluster.executors == known
    assert all(engine.is_connected for engine in known)
    await network.cluster.join(machine.info)
    await turns()
    assert [engine.is_connected for engine in network.cluster.executors] == [True]
    await network.cluster.drain(0)


async def test_stream_of_the_former_life_ends_when_an_executor_has_restarted() -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    await network.cluster.join(machine.info)
    await turns()
    machine.restart()

    await network.cluster.join(machine.info)
    await turns()

    assert [link.is_closed for link in network.links] == [True, False]
    (engine,) = network.cluster.executors
    assert engine.epoch == machine.epoch
    assert engine.is_connected
    await network.cluster.drain(0)


async def test_registrations_are_bounded_when_nobody_answers() -> None:
    network = Network()
    network.held = asyncio.Event()
    infos = [Machine(f"nobody:{number}").info for number in range(MAX_PENDING_JOINS + 1)]
    joining = [asyncio.ensure_future(network.cluster.join(info)) for info in infos[:-1]]
    await turns()

    for info in (infos[-1], infos[0]):
        with pytest.raises(DomainError) as refusal:
            await network.cluster.join(info)
        assert refusal.value.reason == "REGISTRY_BUSY"

    network.held.set()
    await asyncio.gather(*joining)
    assert all(link.is_closed for link in network.links)
    assert network.cluster.executors == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("num_device_blocks", 2**24 + 1),
        ("num_device_blocks", 2**31 - 1),
        ("num_host_blocks", 2**31 - 1),
        ("block_size_tokens", 2**31 - 1),
        ("block_bytes", 2**62),
        ("model.vocab_size", 2**31 - 1),
        ("model.max_model_len_tokens", 2**31 - 1),
        ("model.name", "n" * 2000),
        ("software_version", "v" * 2000),
        ("compute", "c" * 2000),
        ("slow_compute_reason", "c" * 2000),
        ("address", "a" * 1000 + ":1"),
        # It stands in lines of the log.
        ("adapter_support.max_num_loaded", 1),
        ("adapter_support.max_num_loaded", 2**31 - 1),
        ("adapter_support.max_rank", 0),
        ("model.pooling.embedding_size", -1),
        ("model.pooling.embedding_size", 2**16 + 1),
        ("model.pooling.labels", ["x"] * (2**16 + 1)),
        ("model.pooling.labels", ["x" * (2**20 + 1)]),
        ("num_host_blocks", 1),
        ("model.encoder.audio.num_mel_bins", 0),
        ("model.encoder.audio.num_mel_bins", 1025),
        ("model.encoder.audio.num_frames", 2**20 + 1),
        ("model.encoder.audio.num_frames", 2**20),
        ("model.encoder.audio.num_positions", 1499),
        ("model.encoder.audio.sampling_rate", 192_001),
        ("model.encoder.audio.hop_length", 0),
        ("model.encoder.audio.fft_length", 2**14 + 1),
        ("limits.max_message_bytes", 1_919_999),
        ("trial_step.took_us", 0),
        ("trial_step.took_us", 2**60),
        ("trial_step.num_tokens", -1),
        ("trial_step.num_attended", 2**60),
        ("address", "a executor_joined address=b:1"),
        ("address", "a\u2028b:1"),
        ("address", "\x1b[2Jb:1"),
        ("address", "a:65536"),
        ("address", "a:99999"),
        ("address", "a:0"),
        ("address", "a:"),
        ("address", "a"),
        ("address", "a:1:2"),
        ("address", "a:\u0661"),
        ("address", "[::1]:65536"),
    ],
)
def test_info_is_refused_when_a_field_is_out_of_range(path: str, value: object) -> None:
    info = Machine(ADDRESS).info
    if path.startswith("trial_step"):
        info.trial_step.CopyFrom(pb.TrialStep(num_tokens=1, num_attended=1, took_us=1))
        check_executor_info(info)
    if path.startswith(("model.encoder", "limits.max_message_bytes")):
        _take_audio(info)
        check_executor_info(info)
    if path.startswith("adapter_support"):
        info.features.append(pb.FEATURE_ADAPTERS)
        info.limits.max_adapters_per_step = 2
        info.adapter_support.CopyFrom(pb.AdapterSupport(max_num_loaded=2, max_rank=1))
        check_executor_info(info)
    if path.startswith("model.pooling") or path == "num_host_blocks":
        info.features.append(pb.FEATURE_POOLING)
        info.model.pooling.CopyFrom(pb.PoolingInfo(embedding_size=8, uncached=True))
        info.num_host_blocks = 0
        check_executor_info(info)
    set_path(info, path, value)
    with pytest.raises(DomainError) as refusal:
        check_executor_info(info)
    assert refusal.value.reason == "EXECUTOR_INFO_INVALID"
    assert refusal.value.message.startswith(path)
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize("address", ["a:1", "a.b-c_d:65535", "127.0.0.1:80", "[::1]:50052"])
def test_info_is_taken_when_its_address_can_be_dialled(address: str) -> None:
    check_executor_info(Machine(address).info)


def test_info_is_refused_when_it_names_countless_tokens() -> None:
    info = Machine(ADDRESS).info
    info.model.eos_token_ids.extend([1] * 5000)
    with pytest.raises(DomainError, match=r"model.eos_token_ids is 5000 long; allowed: 4096"):
        check_executor_info(info)


def test_info_is_accepted_with_an_unknown_feature() -> None:
    info = Machine(ADDRESS).info
    known = core_config(info, ClusterConfig()).features
    info.features.append(99)  # type: ignore[arg-type]
    check_executor_info(info)
    assert core_config(info, ClusterConfig()).features == known


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, VOCAB_SIZE]])
async def test_prompt_is_checked_once_for_all_executors(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(f"executor:{number}") for number in range(3)]
    network = Network(*machines)
    for machine in machines:
        await network.cluster.join(machine.info)
    await turns()
    looked_at: list[list[int]] = []

    def check(request: Request, config: SchedulerConfig) -> None:
        looked_at.append(request.sequence.token_ids.tolist())
        check_request(request, config)

    monkeypatch.setattr("scheduler_service.scheduler.capabilities.check_request", check)
    stream = GenerateStream(network.cluster.delivery.new_outbox())
    request = Request.create("r", prompt, SamplingParams(max_tokens=1), arrival=1, seed=1)

    with network.cluster.client_stream(stream), suppress(DomainError):
        network.cluster.submit(request, RequestSink(stream, 0), Admission(RequestName("r")))

    assert looked_at == [prompt]
    await network.cluster.drain(0)


async def test_tenants_have_new_weights_at_new_executors() -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    weights: list[dict[str, float]] = []

    async def join() -> None:
        await network.cluster.join(machine.info)
        await turns()

    def note() -> None:
        config = network.cluster.served.largest_config
        assert config is not None
        weights.append(dict(config.tenant_weights))

    network.cluster.weigh_tenants({"a": 2.0})
    await join()
    note()
    network.cluster.weigh_tenants({"a": 3.0})
    note()
    machine.restart()
    await join()
    note()
    assert weights == [{"a": 2.0}, {"a": 2.0}, {"a": 3.0}]
    await network.cluster.drain(0)


async def test_executor_is_not_taken_while_it_hangs_in_a_step() -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    network.step_running_ms = 60_000
    await network.cluster.join(machine.info)
    assert network.cluster.executors == []
    network.step_running_ms = 0
    await network.cluster.join(machine.info)
    await turns()
    assert [engine.address for engine in network.cluster.executors] == [ADDRESS]
    await network.cluster.drain(0)


async def test_lost_life_is_not_taken_while_its_step_runs() -> None:
    machine = Machine(ADDRESS)
    network = Network(machine)
    await network.cluster.join(machine.info)
    await turns()
    cluster = network.cluster
    stream = GenerateStream(cluster.delivery.new_outbox())
    request = Request.create("r", [1, 2], SamplingParams(max_tokens=2), arrival=1, seed=1)
    with cluster.client_stream(stream):
        cluster.submit(request, RequestSink(stream, 0), Admission(RequestName("r")))
        await turns()
        link = network.links[-1]
        assert link.held, "a step is in flight"
        link.break_off()
        await turns()
        assert cluster.executors == []

        network.step_running_ms = 1
        await cluster.join(machine.info)
        assert cluster.executors == []
        network.step_running_ms = 0
        await cluster.join(machine.info)
        assert [engine.life for engine in cluster.executors] == [(ADDRESS, machine.epoch)]
    await cluster.drain(0)


@pytest.mark.parametrize("has_measured", [True, False])
async def test_first_step_has_the_measured_time_times_a_factor(
    has_measured: bool,
) -> None:
    machine = Machine(ADDRESS)
    if has_measured:
        machine.trial_step = pb.TrialStep(num_tokens=4, num_attended=400, took_us=250_000)
    network = Network(machine)
    cluster, config = network.cluster, ClusterConfig()
    await cluster.join(machine.info)
    await turns()
    stream = GenerateStream(cluster.delivery.new_outbox())
    request = Request.create("r", [1, 2, 3], SamplingParams(max_tokens=2), arrival=1, seed=1)
    with cluster.client_stream(stream):
        cluster.submit(request, RequestSink(stream, 0), Admission(RequestName("r")))
        await turns()
        (engine,) = cluster.executors
        first_s = FIRST_LENIENCE * max(FACTOR * 0.25, config.step_patience_s)
        assert cluster.membership.sessions[engine.address].steps.watch.allowed_s == (
            first_s if has_measured else config.step_timeout_s
        )
    await cluster.drain(0)


@pytest.mark.parametrize(("newest", "epoch"), [(0, 7), (6, 7), (7, 7), (8, 9), (2**62 - 1, 2**62)])
def test_epoch_is_not_older_than_the_executor_knows(newest: int, epoch: int) -> None:
    assert epoch_for(pb.ExecutorInfo(newest_scheduler_epoch=newest), 7) == epoch


def test_executor_is_refused_when_no_epoch_is_newer() -> None:
    with pytest.raises(DomainError, match="newest_scheduler_epoch"):
        epoch_for(pb.ExecutorInfo(newest_scheduler_epoch=2**63 - 1), 7)


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 2), (9, 3)])
async def test_executor_gets_as_many_credits_as_it_takes(most: int, expected: int) -> None:
    machine = Machine(ADDRESS)
    network = Network(machine, config=ClusterConfig(pipeline_depth=3))
    machine.max_inflight_steps = most
    await network.cluster.join(machine.info)
    assert [executor.num_credits for executor in network.cluster.executors] == [expected]
    await network.cluster.drain(0)


def config_of(*flags: str) -> ClusterConfig:
    return SchedulerServiceConfig.from_options(options.parse("scheduler", flags, {})).cluster


def test_scheduler_warns_when_steps_have_fewer_tokens_than_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = encode_info(executor_info(make_config(), epoch=1))
    options_ = config_of("--max-num-batched-tokens=7", "--max-num-seqs=8")
    with caplog.at_level(logging.WARNING):
        assert core_config(info, options_).max_num_seqs == 7
    (text,) = [record.getMessage() for record in caplog.records]
    assert "max_num_seqs=8 max_num_batched_tokens=7" in text


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "num_rows"), [(5, 300, 5), (300, 300, 256), (300, 7, 7), (7, 7, 7)]
)
def test_core_has_no_more_rows_than_tokens(
    max_tokens: int, max_rows: int, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    limits = make_config(max_num_batched_tokens=max_tokens, max_num_seqs=max_rows)
    info = encode_info(executor_info(limits, epoch=1))
    with caplog.at_level(logging.WARNING):
        config = core_config(info, ClusterConfig())
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (max_tokens, num_rows)
    texts = [record.getMessage() for record in caplog.records]
    assert [f"max_num_batched_tokens={max_tokens}" in text for text in texts] == [True] * (
        max_tokens == 5
    )


async def test_task_lives_as_long_as_its_owner() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(name)

    async def break_off() -> None:
        raise RuntimeError("a bug")

    tasks = Tasks()
    for name in "abc":
        tasks.begin(wait(name))
    tasks.begin(break_off())
    await asyncio.sleep(0)
    gc.collect()
    assert ended == []
    await tasks.close()
    assert ended == ["a", "b", "c"]
