"""A device that is late, behind the real worker and the real scheduler: the tokens are the same.

Two steps are in flight, and the first is over only when the second has begun: all that a decode is
fed comes from the device. With recorded steps both share the recordings' buffers, and draw there.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.model import LoadedModel, MakeModel, torch_model
from executor_service.runner import CacheConfig, RecordedModels, build_runner
from executor_service.service import Encode, StepWorker
from executor_service.steps import StepExecutor
from scheduler_service.scheduler.values import Feature, Request, SamplingParams, SchedulerConfig
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import EngineWithQueue
from tests.support.core.in_process import InProcessEngine, executor_info, output_token_ids
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.devices.recorded_ops import RecordedOps, SortingDraw, static_model
from tests.support.models.model_pair import generate_greedily, load_reference
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.cases(6)

NUM_OUTPUT_TOKENS = 10
MAX_MODEL_LEN = 64
CONFIG = SchedulerConfig(
    block_size=4,
    num_device_blocks=60,
    max_num_seqs=6,
    max_num_batched_tokens=24,
    max_model_len=MAX_MODEL_LEN,
    max_num_waiting=20,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset(),
)
# Two long ones do not fit beside each other.
SCARCE = replace(CONFIG, num_device_blocks=17)
# Each token takes a microsecond here.
RUN_AHEAD = replace(CONFIG, max_run_ahead=4, features=CONFIG.features | {Feature.SEVERAL_TOKENS})
PROMPTS = [
    [random.Random(length).randrange(3, VOCAB_SIZE) for _ in range(length)]
    for length in (5, 33, 12, 1, 20, 7, 9, 3)
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.9, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
CUT = replace(RANDOM, top_k=40, top_p=0.9, min_p=0.01)
PENALIZED = replace(CUT, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)


@pytest.fixture(params=[False, True], ids=["plain", "recorded"])
def make_model(request: pytest.FixtureRequest) -> MakeModel:
    if not request.param:
        return torch_model
    recorded = RecordedModels(
        static_model,
        CONFIG.max_num_seqs,
        CONFIG.max_num_batched_tokens,
        SortingDraw(),
        RecordedOps,
    )
    return recorded.make


def _load(name: str, factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    directory = make_tiny_model(name, factory.mktemp(name), seed=6)
    return directory, load_model(ModelConfig(str(directory), max_model_len=MAX_MODEL_LEN))


def _cache(config: SchedulerConfig) -> CacheConfig:
    return CacheConfig(config.block_size, config.num_device_blocks, config.num_host_blocks)


def _requests(params: SamplingParams) -> list[Request]:
    return [
        Request.create(str(number), prompt, params, arrival=number, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]


def _generate_late(
    loaded: LoadedModel,
    make_model: MakeModel,
    params: SamplingParams,
    config: SchedulerConfig = CONFIG,
) -> tuple[list[list[int]], EngineWithQueue]:
    streams = LateStreams(is_held=True)
    runner = late_runner(loaded, _cache(config), streams, make_model)
    worker = StepWorker(StepExecutor(executor_info(config, epoch=1), runner))
    scheduler, requests = EngineWithQueue(config), _requests(params)
    for request in requests:
        scheduler.add(request)
    results: SimpleQueue[pb.StepResult] = SimpleQueue()
    in_flight: deque[int] = deque()

    def deliver(encode: Encode) -> None:
        results.put(encode())

    while True:
        while len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            batch = encode_plan(plan, scheduler_epoch=1, executor_epoch=1)
            worker.submit(pb.ScheduleBatch.FromString(batch.data), deliver)
            in_flight.append(len(plan.work.row_ids))
        if not in_flight:
            worker.finish()
            return [output_token_ids(request) for request in requests], scheduler
        streams.wait_for_steps(len(in_flight))
        assert results.empty()
        streams.finish_step()
        result = results.get(timeout=PATIENCE_S)
        scheduler.apply(decode_result(result, in_flight.popleft()))


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", CONFIG),
        # Row ids and blocks change hands while steps are in flight that were told otherwise.
        ("llama", SCARCE),
        # Fewer blocks than a sequence without a window would need.
        ("mistral", replace(SCARCE, num_device_blocks=9)),
    ],
    ids=["plenty", "scarce", "window"],
)
def test_tokens_are_those_of_hugging_face_when_the_device_is_late(
    architecture: str,
    config: SchedulerConfig,
    make_model: MakeModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory, loaded = _load(architecture, tmp_path_factory)
    assert (loaded.sliding_window is not None) == (architecture == "mistral")
    config = replace(config, sliding_window=loaded.sliding_window)
    outputs, scheduler = _generate_late(loaded, make_model, GREEDY, config)
    reference = load_reference(directory)
    assert outputs == [generate_greedily(reference, p, NUM_OUTPUT_TOKENS) for p in PROMPTS]
    assert scheduler.num_preemptions > 0 or config.num_device_blocks != SCARCE.num_device_blocks


@pytest.mark.cases(4)
@pytest.mark.parametrize("params", [RANDOM, CUT, PENALIZED], ids=["plain", "cut", "penalized"])
def test_random_tokens_are_the_same_when_the_device_is_late(
    params: SamplingParams, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, loaded = _load("qwen3", tmp_path_factory)
    outputs, _ = _generate_late(loaded, make_model, params)
    engine = InProcessEngine(CONFIG, build_runner(loaded, _cache(CONFIG)), epoch=1, depth=1)
    for request in _requests(params):
        engine.add(request)
    expected = engine.run()
    assert outputs == [expected[str(number)] for number in range(len(PROMPTS))]


@pytest.mark.cases(4)
@pytest.mark.parametrize("params", [GREEDY, CUT, PENALIZED], ids=["greedy", "cut", "penalized"])
def test_late_device_gives_same_tokens_when_rows_run_on(
    params: SamplingParams, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, loaded = _load("qwen3", tmp_path_factory)
    outputs, running_on = _generate_late(loaded, make_model, params, RUN_AHEAD)
    expected, one_by_one = _generate_late(loaded, make_model, params)
    assert outputs == expected
    brings_several = make_model is not torch_model and params is not PENALIZED
    assert (running_on.num_steps < one_by_one.num_steps) == brings_several
