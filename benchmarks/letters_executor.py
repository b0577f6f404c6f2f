"""An executor that computes nothing: each request gets the letters that its seed says.

`python -m benchmarks.letters_executor SCHEDULER STEP_S [CERTIFICATES]`. Requests have temperature
1, so that the seed is theirs; `letters` is what each must get. It has a tokenizer with a token for
each letter.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models

from executor_service.service import GrpcRegistry, Pacing, Registrar
from executor_service.steps import (
    ExecutorInfo,
    ExecutorLimits,
    FinishedStep,
    Int64Array,
    ModelInfo,
    RowStatus,
    Runner,
    StepInput,
    StepOutput,
)
from splitserve_rpc import NOBODY, Access, ClusterIdentity, ServerSecurity
from tests.support.fakes.fake_executor import start_executor
from tests.support.security.cluster import Certificates

MODEL = "letters"
_NUM_LETTERS = 26
_SEED_FACTOR, _POSITION_FACTOR = 7919, 10_007


def letters(seed: int, num_tokens: int) -> str:
    """The text of a request with this seed; no two of a million have the same."""
    drawn = (_draw(np.full(num_tokens, seed), np.arange(num_tokens)) + ord("a")).astype(np.uint8)
    return drawn.tobytes().decode()


def _draw(seeds: Int64Array, positions: Int64Array) -> Int64Array:
    words = seeds * _SEED_FACTOR + positions * _POSITION_FACTOR
    drawn: Int64Array = (words * words >> 11) % _NUM_LETTERS
    return drawn


class LettersRunner:
    """Looks at nothing but seeds and positions. `step_s`: what a step takes, without a core."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def begin(self, step: StepInput) -> FinishedStep:
        """All rows at once."""
        time.sleep(self._step_s)
        ends = step.num_computed_tokens.astype(np.int64) + step.num_new_tokens
        drawn = _draw(step.seeds, ends - step.num_prompt_tokens)
        token_ids = np.where(step.samples, drawn, -1).astype(np.int32)
        return FinishedStep(StepOutput(np.full(step.num_rows, RowStatus.OK, np.uint8), token_ids))


def _tokenizer() -> Tokenizer:
    vocab = {chr(ord("a") + number): number for number in range(_NUM_LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def describe(num_rows: int, num_blocks: int, num_host_blocks: int = 0) -> ExecutorInfo:
    """An executor of this model."""
    return ExecutorInfo(
        executor_epoch=time.time_ns(),
        model=ModelInfo(MODEL, "1e77" * 16, "float32", "float32", _NUM_LETTERS, 1 << 16),
        block_size=16,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_bytes=1,
        limits=ExecutorLimits(num_rows, 1 << 20),
    )


async def serve(
    scheduler: str, step_s: float, num_rows: int = 1024, identity: ClusterIdentity = NOBODY
) -> None:
    """Serves until terminated."""
    info = describe(num_rows, num_rows * 200)
    await serve_info(scheduler, info, LettersRunner(step_s), identity)


async def serve_info(
    scheduler: str, info: ExecutorInfo, runner: Runner, identity: ClusterIdentity = NOBODY
) -> None:
    """Serves as `info` says until terminated."""
    security = ServerSecurity(Access(identity), identity.tls)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(_tokenizer().to_str())
        server = await start_executor(
            info, runner, tokenizer_files={file.name: file}, security=security
        )

        async def described() -> ExecutorInfo:
            return server.info

        registrar = Registrar(
            GrpcRegistry(scheduler, identity),
            described,
            server.servicer.streams.wait_none_open,
            server.worker.adopt_scheduler_epoch,
            Pacing(sleep=asyncio.sleep),
        )
        await registrar.run()


if __name__ == "__main__":
    directories = [Path(argument) for argument in sys.argv[3:]]
    known = [Certificates(directory).identity("executor") for directory in directories]
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]), identity=known[0] if known else NOBODY))
