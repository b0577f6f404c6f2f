"""What is kept of a fleet's history: its meaning, without times, steps or who computed what.

`answers`: by request, of each sequence how many tokens it has, why it ended and a digest of the
tokens. `order`: by class, its requests in the order of their arrival, where they began so.
`begins`, `ends`: by class, how many requests of all began (ended) before one of it, on average; a
range. `refused`: by class, how many were told that the queue is full; a range.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from splitserve_client import Finish, Tokens
from tests.simulation.client_process import Outcome
from tests.simulation.faults import World
from tests.simulation.golden.fleets import NUM_VARIANTS, Fleet, fleets
from tests.simulation.history import run_history

# A range is wider than what was seen: by so many places on each side, and by more for a class of
# few requests, which is shifted by each of them. Other rules shift classes by more.
_MARGIN = 1.0
_MARGIN_OF_ONE = 2.0
_MARGIN_OF_SEVERAL_EXECUTORS = 1.0
# Requests more or fewer that find the queue full, by whether others have begun a step sooner.
_MARGIN_OF_REFUSED = 2.0
_QUEUE_FULL = "refused: QUEUE_FULL"
_FOLDER = Path(__file__).parent / "recorded"

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Meaning:
    """See the top of this file."""

    fleet: str
    answers: Mapping[str, str] = field(default_factory=dict)
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    begins: Mapping[str, Range] = field(default_factory=dict)
    ends: Mapping[str, Range] = field(default_factory=dict)
    refused: Mapping[str, Range] = field(default_factory=dict)

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps({name: part for name, part in asdict(self).items() if part})

    @classmethod
    def decode(cls, line: str) -> Meaning:
        """Reads what `encode` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a fleet. `problems`: what must not be in any history."""

    fleet: Fleet
    outcomes: Sequence[Outcome]
    slack_s: float
    problems: Sequence[str]

    @property
    def answers(self) -> dict[str, str]:
        """What each request got."""
        return {outcome.wanted.request_id: _answer(outcome) for outcome in self.outcomes}

    @property
    def first_token_times_s(self) -> dict[str, float]:
        """When each request had its first token, if it had one."""
        return {o.wanted.request_id: o.token_times_s[0] for o in self.outcomes if o.token_times_s}

    def classes(self) -> dict[str, list[Outcome]]:
        """The requests of each class in the order of their arrival."""
        by_class: dict[str, list[Outcome]] = {}
        for outcome in sorted(self.outcomes, key=lambda each: each.wanted.number):
            by_class.setdefault(self.fleet.class_of(outcome.wanted), []).append(outcome)
        return by_class

    def places(self, time_of: Callable[[Outcome], float]) -> dict[str, float]:
        """By class, the mean of the places of its requests among all; equal times share a place."""
        times = {o.wanted.request_id: time_of(o) for o in self.outcomes if o.token_times_s}
        place_of = {
            name: sum(other < at_s for other in times.values())
            + (sum(other == at_s for other in times.values()) - 1) / 2
            for name, at_s in times.items()
        }
        return {
            name: _mean(place_of[o.wanted.request_id] for o in some if o.token_times_s)
            for name, some in self.classes().items()
        }

    def refused(self) -> dict[str, float]:
        """By class, how many found the queue full."""
        return {
            name: sum(_answer(outcome) == _QUEUE_FULL for outcome in some)
            for name, some in self.classes().items()
        }


def run(fleet: Fleet, variant: int = 0) -> Run:
    """Runs a fleet; see `Fleet.varied`."""
    scenario, seed = fleet.varied(variant)
    outcomes: list[Outcome] = []

    def keep(world: World) -> list[str]:
        outcomes.extend(outcome for client in world.clients for outcome in client.outcomes)
        return []

    history = run_history(seed, draw=lambda _random: replace(scenario, check=keep))
    # On one executor, whoever was planned first has its first token first.
    num_steps = scenario.config.pipeline_depth + 3 if len(scenario.shapes) > 1 else 0
    slack_s = num_steps * max(shape.step_s for shape in scenario.shapes)
    return Run(fleet, outcomes, slack_s, history.problems)


def record(fleet: Fleet) -> Meaning:
    """What all runs of a fleet agree on. Raises AssertionError if one has a problem."""
    runs = [run(fleet, variant) for variant in range(NUM_VARIANTS)]
    for each in runs:
        assert not each.problems, f"{fleet.name}: {each.problems}"
    answers = [each.answers for each in runs]
    certain = {
        request_id: answer
        for request_id, answer in answers[0].items()
        if answer != _QUEUE_FULL and all(other[request_id] == answer for other in answers)
    }
    if not fleet.has_begins:
        refused = [each.refused() for each in runs]
        is_full = any(sum(each.values()) for each in refused)
        margins = dict.fromkeys(refused[0], _MARGIN_OF_REFUSED)
        return Meaning(fleet.name, certain, refused=_ranges(refused, margins) if is_full else {})
    arrivals = {
        name: [outcome.wanted.request_id for outcome in some]
        for name, some in runs[0].classes().items()
    }
    margin = _MARGIN + _MARGIN_OF_SEVERAL_EXECUTORS * (len(fleet.scenario.shapes) > 1)
    margins = {name: margin + _MARGIN_OF_ONE / len(some) for name, some in arrivals.items()}
    return Meaning(
        fleet.name,
        certain,
        order={
            name: order
            for name, order in arrivals.items()
            if fleet.has_order and len(order) > 1
            if not any(_misplaced(order, each) for each in runs)
        },
        begins=_ranges([each.places(_began_at_s) for each in runs], margins),
        ends=_ranges([each.places(_ended_at_s) for each in runs], margins)
        if fleet.has_ends
        else {},
    )


def differences(recorded: Meaning, now: Run) -> list[str]:
    """What of the recorded meaning is otherwise now; empty if nothing is."""
    found = list(now.problems)
    has_faults = bool(now.fleet.scenario.faults)
    answers = now.answers
    for request_id, answer in recorded.answers.items():
        got = answers.get(request_id, "no answer")
        # A fault may keep a request from its answer, within the rules of every history.
        is_excused = got == _QUEUE_FULL or (has_faults and got.startswith("refused"))
        if got != answer and not is_excused:
            found.append(f"{request_id} got: {got}; recorded: {answer}")
    for name, order in recorded.order.items():
        found += [f"{name}: {pair}" for pair in _misplaced(order, now)]
    counts = (
        ("begins", recorded.begins, now.places(_began_at_s)),
        ("ends", recorded.ends, now.places(_ended_at_s)),
        ("refused", recorded.refused, now.refused()),
    )
    for what, ranges, values in counts:
        found += [
            f"{what} of {name}: {values.get(name)}; recorded: {least:g} to {most:g}"
            for name, (least, most) in ranges.items()
            if not least <= values.get(name, -1.0) <= most
        ]
    return [f"{recorded.fleet}: {difference}" for difference in found]


def _answer(outcome: Outcome) -> str:
    """One text; of each sequence the number of tokens, why it ended, and a digest of them."""
    if outcome.error is not None:
        return f"refused: {outcome.error.reason}"
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for event in outcome.events:
        match event:
            case Tokens(token_ids=token_ids, index=index, finish=finish):
                tokens.setdefault(index, []).extend(token_ids)
                if finish is not None:
                    ends[index] = _end(finish.reason.value, finish.stop_token_id)
            case Finish(reason=reason, stop_token_id=stop_token_id):
                for index in tokens or {0: []}:
                    ends.setdefault(index, _end(reason.value, stop_token_id))
    return ", ".join(
        f"{len(some)} {ends.get(index, 'no end')} {_digest(some)}"
        for index, some in sorted(tokens.items())
    )


def _end(reason: str, stop_token_id: int | None) -> str:
    return reason if stop_token_id is None else f"{reason} at {stop_token_id}"


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:8]


def _misplaced(order: Sequence[str], now: Run) -> list[str]:
    """Neighbours of a recorded order of which the second begins first now, and by how much."""
    times_s = now.first_token_times_s
    missing = [request_id for request_id in order if request_id not in times_s]
    if missing:
        return [f"{request_id} never began" for request_id in missing]
    return [
        f"{second} began before {first}; recorded: {' '.join(order)}"
        for first, second in pairwise(order)
        if times_s[second] < times_s[first] - now.slack_s
    ]


def _began_at_s(outcome: Outcome) -> float:
    return outcome.first_token_at_s


def _ended_at_s(outcome: Outcome) -> float:
    return outcome.token_times_s[-1]


def _ranges(
    values: Sequence[Mapping[str, float]], margins: Mapping[str, float]
) -> dict[str, Range]:
    """By class, from the least to the most, and its margin on both sides."""
    return {
        name: (
            round(min(each[name] for each in values) - margin, 2),
            round(max(each[name] for each in values) + margin, 2),
        )
        for name, margin in margins.items()
    }


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several) if several else -1.0


# -- files: one for each family, one line for each fleet -------------------------------------------


def path_of(family: str) -> Path:
    """The file of a family."""
    return _FOLDER / f"{family}.jsonl"


def read(family: str) -> dict[str, Meaning]:
    """The recorded meanings of a family, by the name of the fleet."""
    meanings = map(Meaning.decode, path_of(family).read_text().splitlines())
    return {meaning.fleet: meaning for meaning in meanings}


def write(family: str, meanings: Iterable[Meaning]) -> None:
    """Writes the file of a family."""
    path_of(family).parent.mkdir(exist_ok=True)
    path_of(family).write_text("".join(f"{meaning.encode()}\n" for meaning in meanings))


def compare(family: str, numbers: slice = slice(None)) -> list[str]:
    """Runs fleets of a family, and tells what is otherwise than recorded."""
    recorded = read(family)
    found: list[str] = []
    for fleet in fleets(family)[numbers]:
        if fleet.name not in recorded:
            found.append(f"{fleet.name} is not recorded")
        else:
            found += differences(recorded[fleet.name], run(fleet))
    return found


def compare_one(task: tuple[str, int]) -> list[str]:
    """Compares one fleet, given by its family and its number there."""
    family, number = task
    return compare(family, slice(number, number + 1))


def record_one(task: tuple[str, int]) -> Meaning:
    """Runs one fleet for its record, given by its family and its number there."""
    family, number = task
    return record(fleets(family)[number])
