"""The wire itself: both directions, byte for byte, as other languages and versions see them.

A golden file is hex, with the message as JSON beside it for people. To accept an intended change:
`python -m tests.contract.test_golden_bytes` writes the files anew.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer, encode_info
from executor_service.steps.batch import (
    StepAnswer,
    StepError,
    StepErrorReason,
    StepStatus,
)
from executor_service.steps.executor_info import (
    DefaultSampling,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    ModelInfo,
    TrialStep,
)
from executor_service.steps.sampling_params import Grammar
from executor_service.steps.step import LogprobColumns, StepOutput
from executor_service.steps.token_runs import TokenRuns
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.steps.batches import NewRow, Sender, WorkRow

FOLDER = Path(__file__).parent / "golden"
SENDER = Sender(scheduler_epoch=1_700_000_000_000_000_001, executor_epoch=1_700_000_000_000_000_002)

_GRAMMARS = (
    pb.Grammar(json_schema='{"type":"object"}'),
    pb.Grammar(regex="[a-zß]+"),
    pb.Grammar(lark="start: /x/"),
    pb.Grammar(choices=pb.Choices(texts=["yes", "no"])),
)


def _rows_with_grammars() -> list[NewRow]:
    return [
        NewRow(10 + index, (106 + index,), params={"grammar": grammar}, history=(30 + index,))
        for index, grammar in enumerate(_GRAMMARS)
    ]


def _batch() -> pb.ScheduleBatch:
    """Every field of ScheduleBatch, with values that no two fields share."""
    params = {
        "temperature": 0.75,
        "top_k": 40,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "logit_bias": {7: -100.0},
        "min_tokens": 3,
        "suppressed_token_ids": [2, 300],
        "num_logprobs": 5,
        "num_prompt_logprobs": 0,
        "allowed_token_ids": [17, 400],
        "bad_words_token_ids": [
            pb.TokenSequence(token_ids=[18]),
            pb.TokenSequence(token_ids=[19, 500]),
        ],
        "stop_token_ids": [2, 301],
    }
    return SENDER.batch(
        258,
        base=257,
        removed=[9],
        new=[
            NewRow(
                4,
                (100, 101),
                num_prompt=2,
                params=params,
                seed=-2,
                history=(11, 12, 13),
                adapter="french",
            ),
            NewRow(6, (-1, 102), cross_blocks=(103, 104), encoder=(21, 22, 23)),
            NewRow(7, (105,), adapter="a", cross_blocks=(103, 104), num_encoder=3),
            *_rows_with_grammars(),
        ],
        writes=[(4, 2, (70000,))],
        swap_out=[(1, 2)],
        swap_in=[(3, 4)],
        copy=[(5, 6), (5, 7)],
        work=[
            WorkRow(4, 3, [14], run_on=5),
            WorkRow(6, 1, back=1, drafts=(23, 24)),
            WorkRow(8, 0, [15, 16], samples=False),
        ],
    )


def _answer() -> StepAnswer:
    logprobs = LogprobColumns(
        row_indexes=np.array([0], np.int32),
        positions=np.array([4], np.int32),
        token_ids=np.array([17], np.int32),
        logprobs=np.array([-0.5], np.float32),
        ranks=np.array([1], np.int32),
        top_offsets=np.array([0, 2], np.int32),
        top_token_ids=np.array([17, 18], np.int32),
        top_logprobs=np.array([-0.5, -1.25], np.float32),
    )
    output = StepOutput(
        row_statuses=np.array([1, 2, 5, 6], np.uint8),
        sampled_token_ids=np.array([17, -1, -1, -1], np.int32),
        row_errors={1: "its logits are no numbers", 3: "the schema is no JSON"},
        logprobs=logprobs,
        prompt_logprobs=logprobs,
        move_us=20,
        forward_us=300,
        sample_us=4000,
    )
    return StepAnswer(
        SENDER.scheduler_epoch, SENDER.executor_epoch, 258, StepStatus.OK, None, output, queue_us=1
    )


def _answer_with_runs() -> StepAnswer:
    statuses, last = np.array([1, 3, 1], np.uint8), np.array([19, -1, 20], np.int32)
    runs = TokenRuns.of([[17, 18, 19], [], [20]])
    output = StepOutput(statuses, last, {1: "why"}, runs=runs)
    return StepAnswer(
        SENDER.scheduler_epoch, SENDER.executor_epoch, 260, StepStatus.OK, None, output
    )


def _refusal() -> StepAnswer:
    error = StepError(StepErrorReason.BLOCK_OUT_OF_RANGE, "copy.source_block_ids", "what and why")
    return StepAnswer(SENDER.scheduler_epoch, SENDER.executor_epoch, 259, StepStatus.REFUSED, error)


def _info() -> ExecutorInfo:
    return ExecutorInfo(
        executor_epoch=SENDER.executor_epoch,
        model=ModelInfo(
            "llama",
            "c0ffee",
            "bfloat16",
            "float16",
            32000,
            4096,
            (2, 128001),
            1024,
            DefaultSampling(0.5, 20, 0.75, 0.25, 1.5),
        ),
        block_size=16,
        num_device_blocks=1000,
        num_host_blocks=50,
        block_bytes=2**33,
        limits=ExecutorLimits(256, 2048, 64 * 1024 * 1024, 8, 3),
        features=frozenset(
            {
                Feature.PENALTIES,
                Feature.LOGPROBS,
                Feature.ADAPTERS,
                Feature.TOKEN_CONSTRAINTS,
                Feature.GRAMMAR,
            }
        ),
        software_version="1.2.3",
        address="executor-1:50052",
        trial_step=TrialStep(16, 4096, 2500),
    )


def messages() -> dict[str, Message]:
    return {
        "schedule_batch": _batch(),
        "step_result_ok": encode_answer(_answer()),
        "step_result_runs": encode_answer(_answer_with_runs()),
        "step_result_refused": encode_answer(_refusal()),
        "executor_info": encode_info(_info()),
    }


def _golden(name: str) -> bytes:
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text(encoding="ascii"))


@pytest.mark.parametrize("name", list(messages()))
def test_message_has_the_same_bytes_when_it_is_encoded(name: str) -> None:
    assert messages()[name].SerializeToString(deterministic=True) == _golden(name)


@pytest.mark.parametrize("name", list(messages()))
def test_bytes_mean_the_same_when_they_are_decoded(name: str) -> None:
    message = type(messages()[name]).FromString(_golden(name))
    expected = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == expected


def test_columns_hold_the_same_values_when_golden_batch_is_decoded() -> None:
    batch = decode_batch(pb.ScheduleBatch.FromString(_golden("schedule_batch")))
    content = batch.content
    assert not isinstance(content, Exception)
    assert content.new_rows is not None
    assert content.table_writes is not None
    found = {
        "identity": (batch.identity.step_id, batch.identity.base_step_id),
        "removed": content.removed_row_ids.tolist(),
        "seeds": content.new_rows.seeds.tolist(),
        "history_offsets": content.new_rows.history_offsets.tolist(),
        "top_k": [params.top_k for params in content.new_rows.sampling_params],
        "temperature": [params.temperature for params in content.new_rows.sampling_params],
        "allowed": [params.allowed_token_ids for params in content.new_rows.sampling_params],
        "bad_words": [params.bad_words_token_ids for params in content.new_rows.sampling_params],
        "grammars": [params.grammar for params in content.new_rows.sampling_params],
        "blocks": content.new_rows.block_ids.tolist(),
        "adapters": content.new_rows.row_adapters,
        "written": content.table_writes.block_ids.tolist(),
        "copied": list(zip(content.copy.sources, content.copy.destinations, strict=True)),
        "steps_back": content.work.sampled_steps_back.tolist(),
        "tokens": content.work.token_ids.tolist(),
        "samples": content.work.samples.tolist(),
    }
    assert found == {
        "identity": (258, 257),
        "removed": [9],
        "seeds": [-2, 0, 0, 0, 0, 0, 0],
        "history_offsets": [0, 3, 3, 3, 4, 5, 6, 7],
        "top_k": [40, None, None, None, None, None],
        "temperature": [0.75, 0.0, 0.0, 0.0, 0.0, 0.0],
        "allowed": [(17, 400), (), (), (), (), ()],
        "bad_words": [((18,), (19, 500)), (), (), (), (), ()],
        "grammars": [
            None,
            None,
            Grammar("json_schema", ('{"type":"object"}',)),
            Grammar("regex", ("[a-zß]+",)),
            Grammar("lark", ("start: /x/",)),
            Grammar("choices", ("yes", "no")),
        ],
        "blocks": [100, 101, -1, 102, 105, 106, 107, 108, 109],
        "adapters": ["french", "", "a", "", "", "", ""],
        "written": [70000],
        "copied": [(5, 6), (5, 7)],
        "steps_back": [0, 1, 0],
        "tokens": [14, 15, 16],
        "samples": [1, 1, 0],
    }


def test_encoder_columns_hold_the_same_values_when_golden_batch_is_decoded() -> None:
    content = decode_batch(pb.ScheduleBatch.FromString(_golden("schedule_batch"))).content
    assert not isinstance(content, Exception)
    assert content.new_rows is not None
    cross = content.new_rows.cross
    assert cross is not None
    assert cross.num_encoder_tokens.tolist() == [0, 3, 3, 0, 0, 0, 0]
    assert cross.block_offsets.tolist() == [0, 0, 2, 4, 4, 4, 4, 4]
    assert cross.block_ids.tolist() == [103, 104, 103, 104]
    assert cross.encoder_offsets.tolist() == [0, 0, 3, 3, 3, 3, 3, 3]
    assert cross.encoder_token_ids.tolist() == [21, 22, 23]


def _write_golden() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, message in messages().items():
        lines = textwrap.wrap(message.SerializeToString(deterministic=True).hex(), 96)
        (FOLDER / f"{name}.hex").write_text("\n".join(lines) + "\n", encoding="ascii")
        content = json_format.MessageToDict(message, preserving_proto_field_name=True)
        text = json.dumps(content, indent=2, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write_golden()
