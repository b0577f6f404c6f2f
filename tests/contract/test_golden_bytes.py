"""The wire itself: both directions, byte for byte, as other languages and versions see them.

A golden file is hex, with the message as JSON beside it for people. To accept an intended change:
`python -m tests.contract.test_golden_bytes` writes the files anew.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from executor_service.service import decode_batch, encode_answer, encode_info
from executor_service.steps import (
    DefaultSampling,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    Grammar,
    LogprobColumns,
    ModelInfo,
    StepAnswer,
    StepError,
    StepErrorReason,
    StepOutput,
    StepStatus,
    TokenRuns,
    TrialStep,
)
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


def _batch_with_pooling() -> pb.ScheduleBatch:
    pooling = pb.PoolingParams(
        task=pb.POOLING_TASK_EMBEDDING, num_dimensions=3, raw=True, second_text_start=1
    )
    params = {"temperature": None, "pooling": pooling}
    return SENDER.batch(261, new=[NewRow(4, (), 2, params)], work=[WorkRow(4, 0, [11, 12])])


def _answer_with_vectors() -> StepAnswer:
    statuses, last = np.array([1, 4], np.uint8), np.array([-1, -1], np.int32)
    vectors = [np.array([0.5, -1.25, 3.0], np.float32), None]
    output = StepOutput(statuses, last, {1: "why"}, vectors=vectors)
    return StepAnswer(
        SENDER.scheduler_epoch, SENDER.executor_epoch, 261, StepStatus.OK, None, output
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
            "gguf",
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
        "schedule_batch_pooling": _batch_with_pooling(),
        "step_result_vectors": encode_answer(_answer_with_vectors()),
        "step_result_refused": encode_answer(_refusal()),
        "executor_info": encode_info(_info()),
    }


def _golden(name: str) -> bytes:
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text(encoding="ascii"))


@pytest.mark.parametrize("name", list(messages()))
def test_message_has_its_golden_bytes(name: str) -> None:
    assert messages()[name].SerializeToString(deterministic=True) == _golden(name)
    message = type(messages()[name]).FromString(_golden(name))
    expected = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == expected


def test_golden_batch_has_its_columns_when_decoded() -> None:
    batch = decode_batch(pb.ScheduleBatch.FromString(_golden("schedule_batch")))
    content = batch.content
    assert not isinstance(content, Exception)
    new = content.new_rows
    assert new is not None
    cross = new.cross
    assert cross is not None
    assert content.table_writes is not None
    assert (batch.identity.step_id, batch.identity.base_step_id) == (258, 257)
    first, *others = new.sampling_params
    assert (first.top_k, first.temperature) == (40, 0.75)
    assert first.allowed_token_ids == (17, 400)
    assert first.bad_words_token_ids == ((18,), (19, 500))
    assert {(each.top_k, each.temperature, each.allowed_token_ids) for each in others} == {
        (None, 0.0, ())
    }
    assert [params.grammar for params in others] == [
        None,
        Grammar("json_schema", ('{"type":"object"}',)),
        Grammar("regex", ("[a-zß]+",)),
        Grammar("lark", ("start: /x/",)),
        Grammar("choices", ("yes", "no")),
    ]
    assert new.row_adapters == ["french", "", "a", "", "", "", ""]
    columns: dict[str, Any] = {
        "removed": content.removed_row_ids,
        "seeds": new.seeds,
        "history_offsets": new.history_offsets,
        "blocks": new.block_ids,
        "num_encoder_tokens": cross.num_encoder_tokens,
        "cross_block_offsets": cross.block_offsets,
        "cross_blocks": cross.block_ids,
        "encoder_offsets": cross.encoder_offsets,
        "encoder_tokens": cross.encoder_token_ids,
        "written": content.table_writes.block_ids,
        "copy_sources": content.copy.sources,
        "copy_destinations": content.copy.destinations,
        "steps_back": content.work.sampled_steps_back,
        "tokens": content.work.token_ids,
        "samples": content.work.samples,
    }
    assert {name: column.tolist() for name, column in columns.items()} == {
        "removed": [9],
        "seeds": [-2, 0, 0, 0, 0, 0, 0],
        "history_offsets": [0, 3, 3, 3, 4, 5, 6, 7],
        "blocks": [100, 101, -1, 102, 105, 106, 107, 108, 109],
        "num_encoder_tokens": [0, 3, 3, 0, 0, 0, 0],
        "cross_block_offsets": [0, 0, 2, 4, 4, 4, 4, 4],
        "cross_blocks": [103, 104, 103, 104],
        "encoder_offsets": [0, 0, 3, 3, 3, 3, 3, 3],
        "encoder_tokens": [21, 22, 23],
        "written": [70000],
        "copy_sources": [5, 5],
        "copy_destinations": [6, 7],
        "steps_back": [0, 1, 0],
        "tokens": [14, 15, 16],
        "samples": [1, 1, 0],
    }


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
