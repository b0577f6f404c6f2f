"""The first step loads no module: streams that move to a new executor would wait for it."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, as something else has loaded everything here.
_STEPS = """
import sys
from scheduler_service.scheduler.values import Request
from scheduler_service.scheduler.values import SamplingParams
from tests.support.core.driver import make_config
from tests.support.core.in_process import InProcessEngine
from tests.support.fakes.fake_runner import FakeRunner

config = make_config(vocab_size=97, eos_token_ids=frozenset())
runner = FakeRunner(
    block_size=config.block_size,
    num_device_blocks=config.num_device_blocks,
    vocab_size=config.vocab_size,
)
engine = InProcessEngine(config, runner, epoch=1, depth=2)
loaded = set(sys.modules)
for number, given in enumerate(({}, {"num_logprobs": 2}, {"n": 2})):
    params = SamplingParams(max_tokens=4, ignore_eos=True, **given)
    engine.add(Request.create(f"r{number}", [5, 6, 7], params, arrival=number, seed=number))
assert all(len(tokens) == 4 for tokens in engine.run().values())
print(*sorted(set(sys.modules) - loaded))
"""


def test_steps_load_no_module_when_they_are_the_first() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == []
