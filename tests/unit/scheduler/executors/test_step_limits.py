"""A step has a token for each sequence that may run, or the scheduler says so when it starts."""

from __future__ import annotations

import logging

import pytest

from executor_service.service.encode_answer import encode_info
from scheduler_service.config import ClusterConfig, SchedulerServiceConfig
from scheduler_service.executors.handshake import core_config
from splitserve_options import options
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info


def config_of(*flags: str) -> ClusterConfig:
    return SchedulerServiceConfig.from_options(options.parse("scheduler", flags, {})).cluster


def test_scheduler_says_both_values_when_a_step_has_fewer_tokens_than_rows(
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
def test_core_has_no_more_rows_than_tokens_when_an_executor_computes_few(
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
