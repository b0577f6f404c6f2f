"""Rows with grammars in steps of a tiny model: whatever happens to one, its tokens are the same."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from executor_service.grammars import CompiledGrammars, GrammarCompiler, RowGrammar
from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, build_runner
from executor_service.service import decode_batch
from executor_service.steps import SAMPLING_FEATURES, Feature, RowStatus, StepExecutor, StepOutput
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_grammars import GrammarTrialResult, GrammarTrials
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.grammars.sampled_texts import EOS, byte_level_texts
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.batches import NewRow, Sender, WorkRow
from tests.support.steps.step_driver import make_executor_info

pytestmark = pytest.mark.cases(12)

PROMPT = [11, 7, 93, 40, 5, 62]
POOLS = CacheConfig(block_size=4, num_device_blocks=128, num_host_blocks=4)
# Without white space, of which a random model has no end.
GRAMMAR = pb.Grammar(regex=r'\{"a":"[^"\x00-\x1f\\]{0,6}","b":(1|"two"|null)\}')
RANDOM: Mapping[str, Any] = {"temperature": 1.0}


class HeldTrial(GrammarTrials):
    """Waits until the test lets it."""

    gate = threading.Event()

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        self.gate.wait()
        return super().ask(kind, texts, max_cpu_s)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    sizes: dict[str, Any] = {
        "vocab_size": byte_level_texts().size,
        "eos_token_id": EOS,
        "bos_token_id": 0,
    }
    return load_tiny_model("llama", tmp_path_factory.mktemp("model"), **sizes)


@dataclass(slots=True)
class Steps:
    """Executes steps of one executor, each on the one before."""

    executor: StepExecutor
    step_id: int = 0
    sender: Sender = field(default_factory=lambda: Sender(50, 1000))

    def run(
        self,
        work: Sequence[WorkRow],
        new: Sequence[NewRow] = (),
        removed: Sequence[int] = (),
    ) -> StepOutput:
        self.step_id += 1
        base = self.step_id - 1 or None
        batch = self.sender.batch(self.step_id, base=base, new=new, work=work, removed=removed)
        answer = self.executor.execute(decode_batch(batch))
        assert answer.output is not None, answer
        return answer.output

    def complete(self, row_id: int, tokens: list[int], num_computed: int, count: int = 60) -> None:
        """Appends what the row samples until it ends, or `count` tokens have come."""
        for _ in range(count):
            output = self.run([WorkRow(row_id, num_computed, tokens[num_computed:])])
            if output.row_statuses[0] == RowStatus.NOT_SAMPLED:
                num_computed = len(tokens) - 1
                continue
            assert output.row_statuses[0] == RowStatus.OK, output.row_errors
            num_computed = len(tokens)
            tokens.append(int(output.sampled_token_ids[0]))
            if tokens[-1] == EOS:
                return


def make_steps(
    loaded: LoadedModel, *, is_late: bool = False, max_wait_s: float = 60.0
) -> Iterator[Steps]:
    vocabulary = byte_level_texts().vocabulary
    grammars = CompiledGrammars(vocabulary, GrammarCompiler(vocabulary, HeldTrial), max_wait_s)
    runner = late_runner(loaded, POOLS, LateStreams()) if is_late else build_runner(loaded, POOLS)
    info = make_executor_info(
        executor_epoch=1000,
        vocab_size=byte_level_texts().size,
        max_model_len=256,
        eos_token_ids=(EOS,),
        num_device_blocks=128,
        num_host_blocks=4,
        features=SAMPLING_FEATURES | {Feature.GRAMMAR, Feature.SEVERAL_TOKENS},
    )
    yield Steps(StepExecutor(info, runner, grammars=grammars))
    HeldTrial.gate.set()
    grammars.close()


@pytest.fixture(params=[False, True], ids=["now", "late"])
def steps(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[Steps]:
    HeldTrial.gate.set()
    yield from make_steps(loaded, is_late=request.param)


@pytest.fixture
def hasty_steps(loaded: LoadedModel) -> Iterator[Steps]:
    """Hardly wait for a grammar, and none is compiled before the gate is open."""
    HeldTrial.gate.clear()
    yield from make_steps(loaded, max_wait_s=0.001)


def row(row_id: int = 0, history: Sequence[int] = PROMPT, **params: Any) -> NewRow:  # noqa: ANN401
    wanted = {"grammar": GRAMMAR, **params}
    return replace(plain_row(row_id), params={**RANDOM, **wanted}, history=history)


def plain_row(row_id: int) -> NewRow:
    blocks = range(32 * row_id, 32 * row_id + 32)
    return NewRow(row_id, blocks, len(PROMPT), dict(RANDOM), seed=row_id + 3)


def completed(steps: Steps, row_id: int = 0, **params: Any) -> list[int]:  # noqa: ANN401
    tokens = list(PROMPT)
    steps.run([], new=[row(row_id, **params)])
    steps.complete(row_id, tokens, 0)
    steps.run([], removed=[row_id])
    return tokens


def test_tokens_are_the_same_when_a_row_runs_on(steps: Steps) -> None:
    expected = completed(steps, frequency_penalty=0.5)
    # With the seed of the row before.
    new = [replace(row(1, frequency_penalty=0.5, stop_token_ids=[EOS]), seed=3)]
    work, tokens = WorkRow(1, 0, PROMPT, run_on=3), [*PROMPT]
    while tokens[-1] != EOS:
        output = steps.run([work], new=new)
        assert output.runs is not None
        tokens += output.runs.token_ids.tolist()
        work, new = WorkRow(1, len(tokens) - 1, back=1, run_on=20), []
    assert tokens == expected


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_when_drafts_meet_a_grammar(steps: Steps, seed: int) -> None:
    rng = random.Random(seed)
    expected = completed(steps, frequency_penalty=0.5)
    new = [replace(row(1, frequency_penalty=0.5, stop_token_ids=[EOS]), seed=3), plain_row(2)]
    tokens, num_taken = [*PROMPT], 0
    while tokens[-1] != EOS:
        rest = expected[len(tokens) :]
        num_right, num_run_on = rng.randint(0, len(rest) - 1), rng.randint(0, 2)
        wrong = [EOS, rng.randrange(byte_level_texts().size), *rest[num_right + 2 :]]
        drafts = [*rest[:num_right], *(each for each in wrong if each != rest[num_right])]
        work = [WorkRow(1, len(tokens) - 1, back=1) if not new else WorkRow(1, 0, PROMPT)]
        work = [replace(work[0], drafts=drafts, run_on=num_run_on), WorkRow(2, 0, PROMPT)]
        output, new = steps.run(work, new=new), []
        assert output.row_statuses.tolist() == [RowStatus.OK] * 2
        assert output.runs is not None
        run, _ = output.runs.rows
        # Who is late need not run on.
        assert num_right < len(run) <= num_right + 1 + num_run_on
        assert run == rest[: len(run)]
        tokens += run
        num_taken += num_right
    assert (tokens, num_taken > 2) == (expected, True)


def test_drafts_wait_with_their_row_when_its_grammar_is_not_compiled(hasty_steps: Steps) -> None:
    work = [WorkRow(0, 0, PROMPT, drafts=[65, 66], run_on=2), WorkRow(1, 0, PROMPT, run_on=1)]
    output = hasty_steps.run(work, new=[row(0), plain_row(1)])
    assert output.row_statuses.tolist() == [RowStatus.NOT_SAMPLED, RowStatus.OK]
    assert output.runs is not None
    assert [len(run) for run in output.runs.rows] == [0, 2]


def check_text(tokens: Sequence[int]) -> None:
    value = json.loads(byte_level_texts().decode(tokens[len(PROMPT) :]))
    assert list(value) == ["a", "b"]
    assert len(value["a"]) <= 6
    assert value["b"] in (1, "two", None)


def test_text_follows_the_grammar_when_a_model_samples(steps: Steps) -> None:
    for row_id in range(3):
        tokens = completed(steps, row_id)
        assert tokens[-1] == EOS
        check_text(tokens)


def test_tokens_are_the_same_when_the_row_leaves_and_comes_again(steps: Steps) -> None:
    expected = completed(steps)
    for kept in range(len(PROMPT), len(expected), 3):
        tokens = expected[:kept]
        # In chunks, of which only the last samples.
        work = [WorkRow(0, 0, tokens[:4], samples=False)]
        steps.run(work, new=[row(history=tokens)])
        steps.complete(0, tokens, 4)
        steps.run([], removed=[0])
        assert tokens == expected


def test_other_rows_have_their_tokens_when_one_has_a_grammar(steps: Steps) -> None:
    new = [plain_row(0), plain_row(2)]
    alone = steps.run([WorkRow(0, 0, PROMPT), WorkRow(2, 0, PROMPT)], new=new)
    steps.run([], removed=[0, 2])
    work = [WorkRow(row_id, 0, PROMPT) for row_id in (0, 1, 2)]
    beside = steps.run(work, new=[plain_row(0), row(1), plain_row(2)])
    assert beside.sampled_token_ids[[0, 2]].tolist() == alone.sampled_token_ids.tolist()


def test_row_is_asked_again_alone_when_its_grammar_is_not_compiled(hasty_steps: Steps) -> None:
    new = [row(0, num_prompt_logprobs=0), plain_row(1)]
    work = [WorkRow(0, 0, PROMPT), WorkRow(1, 0, PROMPT)]
    output = hasty_steps.run(work, new=new)
    assert output.row_statuses.tolist() == [RowStatus.NOT_SAMPLED, RowStatus.OK]
    assert output.sampled_token_ids[0] == -1
    assert output.row_errors == {}
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs.positions) == len(PROMPT) - 1
    again = hasty_steps.run([WorkRow(0, len(PROMPT) - 1, PROMPT[-1:])])
    assert again.row_statuses.tolist() == [RowStatus.NOT_SAMPLED]
    HeldTrial.gate.set()
    tokens = list(PROMPT)
    hasty_steps.complete(0, tokens, len(PROMPT) - 1, count=10_000)
    check_text(tokens)
    hasty_steps.run([], removed=[0])
    assert tokens == completed(hasty_steps)


@pytest.mark.parametrize(
    ("grammar", "output", "word"),
    [
        (pb.Grammar(regex="("), [], "unclosed"),
        (pb.Grammar(json_schema='{"not": {}}'), [], "not"),
        (GRAMMAR, [60], "token 7 of the sequence does not match the grammar"),
    ],
)
def test_row_fails_alone_when_its_grammar_says_nothing(
    steps: Steps, grammar: pb.Grammar, output: list[int], word: str
) -> None:
    tokens = [*PROMPT, *output]
    new = [row(0, history=tokens, grammar=grammar), plain_row(1), row(2)]
    work = [WorkRow(0, 0, tokens), WorkRow(1, 0, PROMPT), WorkRow(2, 0, PROMPT)]
    result = steps.run(work, new=new)
    while RowStatus.NOT_SAMPLED in result.row_statuses:
        work = [WorkRow(0, 0, tokens), WorkRow(1, 0, PROMPT), WorkRow(2, 0, PROMPT)]
        result = steps.run(work)
    assert result.row_statuses.tolist() == [RowStatus.GRAMMAR_INVALID, RowStatus.OK, RowStatus.OK]
    assert word in result.row_errors[0]
    assert result.sampled_token_ids[0] == -1


def test_row_has_invalid_logits_when_params_exclude_its_grammar(
    steps: Steps,
) -> None:
    letter = byte_level_texts().ids("x")
    output = steps.run([WorkRow(0, 0, PROMPT)], new=[row(allowed_token_ids=letter)])
    assert output.row_statuses.tolist() == [RowStatus.INVALID_LOGITS]


def test_params_choose_among_what_the_grammar_allows(steps: Steps) -> None:
    texts = byte_level_texts()
    [a], [b] = texts.ids("a"), texts.ids("b")
    grammar = pb.Grammar(regex="[ab]")
    for bias, expected in (({a: 50.0}, a), ({b: 50.0}, b), ({a: 50.0, 300: 99.0}, a)):
        output = steps.run([WorkRow(0, 0, PROMPT)], new=[row(grammar=grammar, logit_bias=bias)])
        assert output.sampled_token_ids.tolist() == [expected]
        steps.run([], removed=[0])


def test_logprobs_are_of_raw_logits_under_a_grammar(steps: Steps) -> None:
    output = steps.run([WorkRow(0, 0, PROMPT)], new=[row(num_logprobs=200)])
    assert output.logprobs is not None
    total = torch.from_numpy(output.logprobs.top_logprobs).exp().sum()
    assert 0.5 < float(total) <= 1.001
    assert torch.isfinite(torch.from_numpy(output.logprobs.top_logprobs)).all()


def test_row_must_be_added_again_when_its_grammar_is_lost(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(PROMPT)
    output = steps.run([WorkRow(0, 0, PROMPT)], new=[row(0)])
    tokens.append(int(output.sampled_token_ids[0]))
    with monkeypatch.context() as broken:
        broken.setattr(RowGrammar, "is_pending", True)
        # Beside a row that samples: a step waits only for grammars without which it has nothing.
        work = [WorkRow(0, len(PROMPT), tokens[-1:]), WorkRow(1, 0, PROMPT)]
        output = steps.run(work, new=[plain_row(1)])
    assert output.row_statuses.tolist() == [RowStatus.INPUT_UNAVAILABLE, RowStatus.OK]
    assert output.sampled_token_ids[0] == -1
    steps.run([], removed=[0, 1])
    steps.run([WorkRow(0, 0, tokens)], new=[row(0, history=tokens)])
