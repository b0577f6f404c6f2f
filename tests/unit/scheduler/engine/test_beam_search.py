"""Beam search over score tables, and beams as sequences of the engine."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.values import (
    BeamParams,
    BeamSearch,
    EarlyStopping,
    FinishReason,
    Hypothesis,
    SchedulingParams,
    StepEvents,
    StepOutcome,
)
from tests.support.core.driver import CoreDriver
from tests.support.core.in_process import CheckedEngine
from tests.support.fakes.expected_outputs import Oracle, Spec
from tests.support.fakes.fake_model import fake_logprob

Tokens = tuple[int, ...]
Scorer = Callable[[Tokens], Mapping[int, float]]

STOP = 9
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)


def make_search(
    width: int = 2,
    penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    max_tokens: int = 10,
    min_tokens: int = 0,
) -> BeamSearch:
    return BeamSearch(
        BeamParams(width, penalty, early_stopping),
        n=width,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=frozenset({STOP}),
    )


def run(search: BeamSearch, scorer: Scorer, num_candidates: int | None = None) -> list[Hypothesis]:
    """Runs `search` to its end, and checks each selection."""
    beams: list[Tokens] = [()]
    count = search.num_candidates if num_candidates is None else num_candidates
    while not search.is_finished:
        scored = [sorted(scorer(beam).items(), key=lambda item: -item[1]) for beam in beams]
        selection = search.advance([tokens[:count] for tokens in scored])
        beams = [(*beams[parent], token_id) for parent, token_id in selection.beams]
        assert selection.is_finished is search.is_finished is (not beams)
        # The width: there is one stop token.
        assert len(set(beams)) == len(beams) <= search.num_candidates - 1
    return search.hypotheses


@cache
def random_scores(seed: int, vocab_size: int, output: Tokens) -> Mapping[int, float]:
    """The log-softmax of random logits."""
    chance = random.Random(f"{seed} {output}")
    logits = [chance.gauss(0.0, 2.0) for _ in range(vocab_size)]
    total = math.log(sum(math.exp(x) for x in logits))
    return {token_id: x - total for token_id, x in enumerate(logits)}


def logprob_of(scorer: Scorer, output: Tokens) -> float:
    return math.fsum(scorer(output[:i])[token_id] for i, token_id in enumerate(output))


def test_advance_breaks_ties_by_beam_then_token() -> None:
    search = make_search(width=3)
    selection = search.advance([[(6, -1.0), (2, -1.0), (4, -1.0)]])
    assert list(selection.beams) == [(0, 2), (0, 4), (0, 6)]
    candidates = [[(7, -1.0)], [(8, -1.0), (1, -1.0)], [(0, -1.0)]]
    assert list(search.advance(candidates).beams) == [(0, 7), (1, 1), (1, 8)]


def test_advance_skips_tokens_when_they_are_impossible() -> None:
    assert make_search().advance([[(3, -0.1), (4, -math.inf), (5, math.nan)]]).beams == [(0, 3)]


def test_advance_ends_without_hypotheses_when_nothing_can_follow() -> None:
    search = make_search(min_tokens=1)
    assert search.advance([[(STOP, 0.0), (4, -math.inf)]]).is_finished
    assert search.hypotheses == []


def test_advance_raises_when_candidates_are_of_other_beams() -> None:
    search = make_search()
    with pytest.raises(ValueError, match="zip"):
        search.advance([[(3, -0.1)], [(4, -0.1)]])


def test_hypothesis_is_not_recorded_outside_the_best() -> None:
    search = make_search(width=2)
    search.advance([[(3, -1.0), (4, -1.1), (STOP, -1.2)]])
    assert search.hypotheses == []


def test_hypotheses_are_the_best_n_of_a_wider_search() -> None:
    search = BeamSearch(BeamParams(3), n=2, max_tokens=1)
    search.advance([[(3, -0.5), (4, -1.0), (5, -1.5)]])
    assert [h.token_ids for h in search.hypotheses] == [(3,), (4,)]


def _ends_at_first_step(penalty: float, early: EarlyStopping, logprob: float = -1.2) -> bool:
    """A hypothesis scores -1.0; the live beam has `logprob`. Does the search end?"""
    search = make_search(1, penalty, early)
    return search.advance([[(STOP, -1.0), (3, logprob)]]).is_finished


@pytest.mark.parametrize("early_stopping", [EarlyStopping.ALWAYS, EarlyStopping.HEURISTIC])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_search_ends_when_it_is_full(penalty: float, early_stopping: EarlyStopping) -> None:
    assert _ends_at_first_step(penalty, early_stopping)


@pytest.mark.parametrize(
    ("penalty", "logprob", "ends"),
    [
        (-1.0, -1.2, True),
        (0.0, -1.2, True),
        (1.0, -1.2, False),
        (1.0, -9.9, False),
        (1.0, -10.0, True),  # At length 10 it equals the hypothesis.
        (2.0, -99.9, False),
    ],
)
def test_search_goes_on_when_length_could_pay(penalty: float, logprob: float, ends: bool) -> None:
    assert _ends_at_first_step(penalty, EarlyStopping.NEVER, logprob) is ends


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize("penalty", [-1.0, 1.0])
def test_search_goes_on_when_full_but_not_always(penalty: float, early: EarlyStopping) -> None:
    search = make_search(2, penalty, early)
    search.advance([[(STOP, -2.0), (3, -2.5), (4, -9.0)]])
    # Now comes a second hypothesis, and a live beam that is better than that one.
    is_finished = search.advance([[(5, -0.2), (6, -20.0)], [(STOP, -0.1)]]).is_finished
    assert is_finished is (early is EarlyStopping.ALWAYS)


seeds = st.integers(0, 10_000)
searches: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    width=st.integers(1, 5),
    penalty=st.sampled_from(PENALTIES),
    early_stopping=st.sampled_from(EarlyStopping),
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 3),
)


@given(seed=seeds, penalty=st.sampled_from(PENALTIES))
def test_hypotheses_are_the_best_of_all_when_none_is_dropped(seed: int, penalty: float) -> None:
    def scores(output: Tokens) -> Mapping[int, float]:
        return dict(zip((0, 1, STOP), random_scores(seed, 3, output).values(), strict=True))

    complete = [
        (*head, last)
        for length in range(4)
        for head in itertools.product((0, 1), repeat=length)
        for last in ((0, 1, STOP) if length == 3 else (STOP,))
    ]
    ranked = sorted(complete, key=lambda o: -logprob_of(scores, o) / len(o) ** penalty)
    hypotheses = run(make_search(len(complete), penalty, max_tokens=4), scores)
    assert [h.token_ids for h in hypotheses] == ranked


@given(seed=seeds, options=searches, vocab_size=st.integers(10, 16))
def test_search_keeps_its_promises_when_scores_are_random(
    seed: int, options: dict[str, Any], vocab_size: int
) -> None:
    scorer = partial(random_scores, seed, vocab_size)
    search = make_search(**options)
    hypotheses = run(search, scorer)
    assert len({h.token_ids for h in hypotheses}) == len(hypotheses) == options["width"]
    assert hypotheses == sorted(hypotheses, key=lambda h: -h.score)
    for h in hypotheses:
        length = len(h.token_ids)
        assert h.cumulative_logprob == pytest.approx(logprob_of(scorer, h.token_ids))
        assert h.score == pytest.approx(h.cumulative_logprob / length ** options["penalty"])
        assert STOP not in h.token_ids[:-1]
        assert h.stop_token_id == (STOP if h.token_ids[-1] == STOP else None)
        assert length == options["max_tokens"] or h.stop_token_id == STOP
        assert h.stop_token_id is None or length > options["min_tokens"]


@given(seed=seeds, options=searches)
def test_search_gives_the_same_when_told_more(seed: int, options: dict[str, Any]) -> None:
    scorer = partial(random_scores, seed, 12)
    search, informed = (make_search(**options) for _ in range(2))
    assert run(search, scorer) == run(informed, scorer, num_candidates=12)


PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("width", [1, 8])
def test_beams_find_what_a_plain_search_finds(width: int) -> None:
    engine = CheckedEngine(depth=2)
    request = engine.add(PROMPT, max_tokens=9, beam=BeamParams(width), n=width)
    engine.run()
    found = [(c.token_ids, c.score, c.cumulative_logprob) for c in request.completions]
    _, expected = Oracle(engine.config).make_request(Spec(tuple(PROMPT), request.params), 1)
    logprobs = [sum(map(fake_logprob, tokens)) for tokens in expected.outputs]
    assert found == list(zip(expected.outputs, expected.scores, logprobs, strict=True))
    assert len(found) == width


def test_beam_search_is_charged_for_each_beam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CheckedEngine(queue_policy="fair", depth=1)
    charged = Counter[str]()
    apply = engine.core.apply

    def counted(outcome: StepOutcome) -> StepEvents:
        events = apply(outcome)
        charged.update(events.num_sampled)
        return events

    monkeypatch.setattr(engine.core, "apply", counted)
    scheduling = SchedulingParams(tenant="a")
    engine.add(PROMPT, max_tokens=9, beam=BeamParams(4), n=4, scheduling=scheduling)
    engine.run()

    # The prompt has one row, and each of the eight steps after it four beams.
    assert charged == {"a": 1 + 8 * 4}


def test_beams_share_full_blocks_only_when_their_tokens_agree() -> None:
    engine = CheckedEngine(prefix_caching=False)
    engine.add([*PROMPT, 7, 8, 9], max_tokens=9, beam=BeamParams(4), n=4)
    engine.step(4)
    engine.engine.fill()
    rows = engine.core.placement.rows
    beams = [
        (rows.block_table(s.row_id).tolist(), rows.known_tokens(s.row_id)[:12].tolist())
        for s in rows.running
    ]
    pairs = list(itertools.combinations(beams, 2))
    assert len(pairs) == 6
    for (table, tokens), (other_table, other_tokens) in pairs:
        assert table[:2] == other_table[:2]
        assert (table[2] == other_table[2]) is (tokens == other_tokens)
        assert table[3] != other_table[3]
    assert any(tokens == other_tokens for (_, tokens), (_, other_tokens) in pairs)


def test_rows_are_kept_for_beams_when_others_wait() -> None:
    driver = CoreDriver(max_num_seqs=4)
    driver.add(3, beam=BeamParams(4))
    driver.add(3, "next")
    assert [name for name, _, _ in driver.next_rows()] == ["r1"]
    assert driver.core.num_waiting == 1


def test_beams_end_by_length_when_max_tokens_is_reached() -> None:
    engine = CheckedEngine()
    request = engine.add(PROMPT, max_tokens=4, beam=BeamParams(2))
    engine.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert [completion.finish_reason for completion in request.completions] == [FinishReason.LENGTH]


def test_beams_end_at_the_length_of_the_model() -> None:
    engine = CheckedEngine(max_model_len=10)
    request = engine.add(PROMPT, max_tokens=40, beam=BeamParams(2))
    engine.run()
    assert request.finish_reason is FinishReason.MODEL_LENGTH
    assert len(request.completions[0].token_ids) == 4


def test_request_fails_alone_when_a_beam_gets_no_logprobs() -> None:
    driver = CoreDriver()
    request, other = driver.add(3, beam=BeamParams(2)), driver.add(3)
    driver.plan()
    driver.answer()
    assert request.error == (
        "ROW_FAILED",
        "the executor broke the step contract: logprobs are missing",
    )
    assert other.error is None
