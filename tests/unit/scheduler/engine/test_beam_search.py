"""Beam search over score tables: what it selects, records and when it ends."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.values.beam_search import BeamSearch, Hypothesis
from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping

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


def test_advance_takes_the_best_tokens_of_the_prompt_when_first() -> None:
    selection = make_search().advance([[(4, -0.5), (3, -1.0), (5, -2.0)]])
    assert list(selection.beams) == [(0, 4), (0, 3)]
    assert not selection.is_finished


def test_advance_ranks_across_beams_when_several_are_live() -> None:
    search = make_search(width=3)
    search.advance([[(1, -1.0), (2, -1.5), (3, -4.0)]])
    candidates = [[(5, -3.0)], [(6, -0.1), (7, -1.0), (8, -9.0)], [(5, -0.1)]]
    selection = search.advance(candidates)
    assert list(selection.beams) == [(1, 6), (1, 7), (0, 5)]


def test_advance_prefers_the_earlier_beam_then_the_smaller_token_when_tied() -> None:
    search = make_search(width=3)
    selection = search.advance([[(6, -1.0), (2, -1.0), (4, -1.0)]])
    assert list(selection.beams) == [(0, 2), (0, 4), (0, 6)]
    candidates = [[(7, -1.0)], [(8, -1.0), (1, -1.0)], [(0, -1.0)]]
    assert list(search.advance(candidates).beams) == [(0, 7), (1, 1), (1, 8)]


def test_advance_fills_the_beams_with_others_when_a_stop_token_is_chosen() -> None:
    selection = make_search().advance([[(STOP, -0.1), (3, -3.0), (5, -4.0)]])
    assert list(selection.beams) == [(0, 3), (0, 5)]


def test_advance_skips_tokens_when_they_are_impossible() -> None:
    assert make_search().advance([[(3, -0.1), (4, -math.inf), (5, math.nan)]]).beams == [(0, 3)]


def test_advance_ends_without_hypotheses_when_nothing_can_follow() -> None:
    search = make_search(min_tokens=1)
    assert search.advance([[(STOP, 0.0), (4, -math.inf)]]).is_finished
    assert search.hypotheses == []


def test_advance_raises_when_candidates_are_not_those_of_the_live_beams() -> None:
    search = make_search()
    with pytest.raises(ValueError, match="zip"):
        search.advance([[(3, -0.1)], [(4, -0.1)]])


@pytest.mark.parametrize("penalty", PENALTIES)
def test_hypothesis_divides_by_the_output_length_when_a_stop_token_ends_it(penalty: float) -> None:
    search = make_search(width=1, penalty=penalty, max_tokens=4)
    search.advance([[(3, -1.0)]])
    search.advance([[(STOP, -0.5), (4, -100.0)]])
    assert search.hypotheses == [Hypothesis((3, STOP), -1.5 / 2**penalty, -1.5, STOP)]


def test_hypothesis_is_not_recorded_when_its_stop_token_is_not_among_the_best() -> None:
    search = make_search(width=2)
    search.advance([[(3, -1.0), (4, -1.1), (STOP, -1.2)]])
    assert search.hypotheses == []


def test_stop_tokens_are_not_chosen_when_there_are_fewer_than_min_tokens() -> None:
    search = make_search(width=1, min_tokens=2, early_stopping=EarlyStopping.ALWAYS)
    hypotheses = run(search, lambda _: {STOP: -0.1, 3: -2.0})
    assert [h.token_ids for h in hypotheses] == [(3, 3, STOP)]


def test_live_beams_become_hypotheses_when_they_reach_max_tokens() -> None:
    search = make_search(width=2, max_tokens=1)
    selection = search.advance([[(3, -0.5), (STOP, -1.0), (4, -1.5)]])
    assert selection.is_finished
    assert search.hypotheses == [
        Hypothesis((3,), -0.5, -0.5, None),
        Hypothesis((STOP,), -1.0, -1.0, STOP),
    ]


def test_hypothesis_is_replaced_when_a_better_one_is_found() -> None:
    search = make_search(width=1, early_stopping=EarlyStopping.NEVER)
    search.advance([[(STOP, -1.0), (3, -1.2)]])
    assert [h.token_ids for h in search.hypotheses] == [(STOP,)]
    search.advance([[(STOP, -0.1), (3, -3.0)]])
    assert [h.token_ids for h in search.hypotheses] == [(3, STOP)]


def test_hypotheses_are_only_the_best_when_n_is_less_than_the_width() -> None:
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


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_search_goes_on_when_it_is_not_full(early_stopping: EarlyStopping) -> None:
    search = make_search(width=2, early_stopping=early_stopping)
    assert not search.advance([[(STOP, -0.1), (3, -50.0), (4, -60.0)]]).is_finished


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
