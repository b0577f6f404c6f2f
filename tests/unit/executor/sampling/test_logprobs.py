from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.device.kv_cache import to_host
from executor_service.sampling.truncation import ScoredTokens, make_columns, score
from executor_service.steps.step import LogprobColumns


def _score(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> LogprobColumns:
    rows = np.arange(len(token_ids), dtype=np.int32)
    tokens = ScoredTokens(
        rows, rows + 5, np.array(token_ids, dtype=np.int32), np.array(num_top, dtype=np.int32)
    )
    scores = score(logits, torch.tensor(token_ids, dtype=torch.int32), max(num_top))
    return make_columns(tokens, to_host(*scores))


def test_score_tokens_gives_logprobs_and_ranks_when_tokens_differ() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -torch.inf], [5.0, 5.0, 6.0]])
    columns = _score(logits, [2, 1, 0], [0, 0, 0])
    expected = torch.log_softmax(logits, dim=-1)[[0, 1, 2], [2, 1, 0]]
    assert columns.logprobs.tolist() == pytest.approx(expected.tolist())
    assert columns.ranks.tolist() == [2, 1, 2]
    assert columns.positions.tolist() == [5, 6, 7]
    assert columns.top_offsets.tolist() == [0, 0, 0, 0]


def test_score_tokens_gives_alternatives_when_more_are_asked_than_there_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 8.0, 7.0]])
    columns = _score(logits, [0, 0], [1, 10])
    assert columns.top_offsets.tolist() == [0, 1, 4]
    assert columns.top_token_ids.tolist() == [1, 0, 1, 2]
    assert columns.top_logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_score_tokens_sorts_alternatives_when_they_are_the_whole_vocabulary() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    columns = _score(logits, [7, 8], [300, 64])
    expected = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    top_ids = [*expected.indices[0].tolist(), *expected.indices[1, :64].tolist()]
    top_logprobs = [*expected.values[0].tolist(), *expected.values[1, :64].tolist()]
    assert columns.top_token_ids.tolist() == top_ids
    assert columns.top_logprobs.tolist() == pytest.approx(top_logprobs)


def test_score_tokens_goes_in_parts_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    token_ids, num_top = list(range(11)), [row % 3 for row in range(11)]
    whole = _score(logits, token_ids, num_top)
    monkeypatch.setattr("executor_service.sampling.truncation._TOKENS_AT_A_TIME", 4)
    parts = _score(logits, token_ids, num_top)
    assert parts.logprobs.tolist() == whole.logprobs.tolist()
    assert parts.top_token_ids.tolist() == whole.top_token_ids.tolist()
    assert parts.top_offsets.tolist() == whole.top_offsets.tolist()
