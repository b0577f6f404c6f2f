"""Random histories of the pure scheduler: requests end as they should, the same way each time.

As a program, prints a digest of all effects of the histories whose seeds it is given.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from random import Random

import pytest

from scheduler_service.scheduler import LossCause, effects, events
from scheduler_service.scheduler.values import FleetConfig, SchedulingParams
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from tests.support.core.machines import Machine
from tests.support.core.pure_fleet import PureFleet, a_request, tokens_of
from tests.support.processes.forked import ROOT

NUM_EVENTS = 120
RETURN_S = 2.0
_POLICIES = ("fcfs", "priority", "fair", "deadline")
_TENANTS = ("", "a", "b")
# What may end requests here: engines that fail, and answers that are spoiled or too late.
_REASONS = (
    "DEADLINE_UNREACHABLE",
    "EXECUTOR_LOST_REPEATEDLY",
    "INVALID_LOGITS",
    "PROMPT_TOO_LONG",
    "ROW_FAILED",
)


class PureHistory:
    """One history. `lines`: all effects so far, as text."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.policy = random.choice(_POLICIES)
        self.fleet = PureFleet(
            FleetConfig(
                queue_policy=self.policy,
                executor_return_s=RETURN_S,
                max_executor_losses=random.choice([1, 2, 1000]),
                max_num_waiting=random.choice([4, 1000]),
            )
        )
        self.machines = [self._new_machine(number) for number in range(random.randint(1, 4))]
        self.lengths: dict[int, int] = {}
        self.lines: list[str] = []

    def _new_machine(self, number: int) -> Machine:
        random = self.random
        machine = Machine(
            f"executor:{number}",
            max_num_seqs=random.choice([1, 2, 4]),
            num_device_blocks=random.choice([6, 24]),
            max_model_len=random.choice([3, 200, 200, 200]),
            queue_policy=self.policy,
        )
        machine.sick_every = random.choice([1, 5])
        return machine

    def run(self) -> None:
        """Draws what happens, then lets everything end well, and checks what clients got."""
        happenings: list[Callable[[], list[effects.Effect]]] = [
            *[self._submit] * 5,
            *[self._answer] * 12,
            *[self._settle] * 6,
            *[self._pass_time] * 2,
            *(self._abort, self._join, self._join, self._join, self._lose, self._doubt),
            *(self._drain, self._expire, self._undrain, self._spoil, self._sicken, self._weigh),
        ]
        for machine in self.machines:
            self._note(self.fleet.join(machine))
        for _ in range(NUM_EVENTS):
            self._note(self.random.choice(happenings)())
        self._end()

    def _note(self, found: list[effects.Effect]) -> None:
        self.lines += map(describe, found)

    def _end(self) -> None:
        """All executors are well, and all requests end."""
        for machine in self.machines:
            machine.fails = machine.is_not_a_number = False
            self._note(self.fleet.handle(events.ExecutorUndrained(machine.address)))
            self._note(self.fleet.handle(events.ExecutorDoubted(machine.address, False)))
            if machine.address not in self.fleet.scheduler.executors:
                machine.restart()
                self._note(self.fleet.join(machine))
        before = len(self.fleet.effects)
        # One that takes all requests, so that none waits for ever.
        self._note(self.fleet.join(Machine("executor:9", queue_policy=self.policy)))
        self.fleet.run()
        self.lines += map(describe, self.fleet.effects[before:])
        self._check()

    def _check(self) -> None:
        fleet = self.fleet
        assert fleet.finished.keys() == {f"r{number}" for number in self.lengths}
        for number, length in self.lengths.items():
            request = fleet.finished[f"r{number}"]
            expected, got = tokens_of(number, length), fleet.tokens.get(number, [])
            assert got == expected[: len(got)], f"wrong tokens of r{number}"
            if request.error is not None:
                assert request.error[0] in _REASONS, request.error
            elif request.finish_reason is not None and request.finish_reason.value == "length":
                assert got == expected, f"r{number} lacks tokens"
        for executor in fleet.scheduler.executors.values():
            assert executor.engine.num_free_blocks == executor.config.num_device_blocks

    # -- what happens --------------------------------------------------------------------------

    def _here(self) -> list[Machine]:
        return [each for each in self.machines if each.address in self.fleet.scheduler.executors]

    def _submit(self) -> list[effects.Effect]:
        random, number = self.random, len(self.lengths) + 1
        length, late_ns = random.randint(1, 12), random.choice([None, None, 10**8])
        scheduling = SchedulingParams(
            priority=random.choice([0, 0, 1]),
            tenant=random.choice(_TENANTS),
            deadline_ns=None if late_ns is None else self.fleet.now_ns + late_ns,
        )
        if number > 96:
            return []
        try:
            found = self.fleet.submit(a_request(number, scheduling, max_tokens=length))
        except DomainError:
            return []
        self.lengths[number] = length
        return found

    def _answer(self) -> list[effects.Effect]:
        busy = [each for each in self._here() if self.fleet.held.get(each.address)]
        return self.fleet.answer(self.random.choice(busy)) if busy else []

    def _spoil(self) -> list[effects.Effect]:
        busy = [each for each in self._here() if self.fleet.held.get(each.address)]
        if not busy:
            return []
        return self.fleet.answer(self.random.choice(busy), _another_step)

    def _settle(self) -> list[effects.Effect]:
        return self.fleet.settle()

    def _pass_time(self) -> list[effects.Effect]:
        return self.fleet.pass_time(self.random.choice([0.001, 0.05, 1.5]))

    def _abort(self) -> list[effects.Effect]:
        unfinished = list(self.fleet.scheduler.locations)
        return self.fleet.abort(self.random.choice(unfinished)) if unfinished else []

    def _join(self) -> list[effects.Effect]:
        """An executor is there again, or anew though the last life was not seen to end."""
        machine = self.random.choice(self.machines)
        if machine in self._here() and self.random.random() < 0.7:
            return []
        machine.restart()
        return self.fleet.join(machine, num_credits=self.random.randint(1, 3))

    def _lose(self) -> list[effects.Effect]:
        here = self._here()
        if not here:
            return []
        cause = self.random.choice([LossCause.DIED, LossCause.SILENT])
        return self.fleet.lose(self.random.choice(here), cause)

    def _doubt(self) -> list[effects.Effect]:
        address = self.random.choice(self.machines).address
        return self.fleet.handle(events.ExecutorDoubted(address, self.random.random() < 0.5))

    def _drain(self) -> list[effects.Effect]:
        return self.fleet.handle(events.ExecutorDraining(self.random.choice(self.machines).address))

    def _expire(self) -> list[effects.Effect]:
        address = self.random.choice(self.machines).address
        return self.fleet.handle(events.ExecutorDrainExpired(address))

    def _undrain(self) -> list[effects.Effect]:
        address = self.random.choice(self.machines).address
        return self.fleet.handle(events.ExecutorUndrained(address))

    def _sicken(self) -> list[effects.Effect]:
        machine = self.random.choice(self.machines)
        machine.fails = self.random.random() < 0.3
        machine.is_not_a_number = self.random.random() < 0.3
        return []

    def _weigh(self) -> list[effects.Effect]:
        return self.fleet.handle(events.TenantsWeighed({"a": self.random.choice([1.0, 3.0])}))


def _another_step(result: pb.StepResult) -> None:
    result.step_id += 1


def describe(effect: effects.Effect) -> str:
    """An effect as text, which two runs have in common if they do the same."""
    match effect:
        case effects.SendStep(address, plan):
            work = plan.work
            columns = (work.row_ids, work.num_computed_tokens, work.num_new_tokens)
            return f"SendStep {address} {plan.step_id} {[each.tolist() for each in columns]}"
        case effects.DeliverTokens(found):
            ended = [request.request_id for request in found.finished]
            return f"DeliverTokens {found.client_keys.tolist()} {found.token_ids.tolist()} {ended}"
        case effects.ExecutorGone():
            names = [request.request_id for request in effect.requests]
            return f"ExecutorGone {effect.address} {effect.cause} {effect.why} {names}"
        case effects.RequestAssigned(request, address, assignment):
            return f"RequestAssigned {request.request_id} {address} {assignment}"
        case effects.RequestMoved(request, address, reason):
            return f"RequestMoved {request.request_id} {address} {reason}"
        case effects.RequestFinished(request):
            return f"RequestFinished {request.request_id} {request.error}"
        case effects.RequestAcquitted(request, reason):
            return f"RequestAcquitted {request.request_id} {reason}"
        case effects.RequestQuarantined(request) | effects.RequestBlamed(request):
            return f"{type(effect).__name__} {request.request_id}"
        case _:
            return repr(effect)


def digest_of(seeds: range) -> str:
    """Of all effects of the histories with these seeds."""
    digest = hashlib.sha256()
    for seed in seeds:
        history = PureHistory(seed)
        history.run()
        digest.update("\n".join(history.lines).encode())
    return digest.hexdigest()


_NUM_SEEDS = 4 * int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "12"))
_NUM_PARTS = 4
_SOURCE_ROOTS = (".", "common", "protos", "kernels", "clients")


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_every_request_gets_its_tokens_once_whatever_happens(part: int) -> None:
    for seed in range(part, _NUM_SEEDS, _NUM_PARTS):
        PureHistory(seed).run()


def test_effects_are_the_same_in_processes_whose_sets_have_other_orders() -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in _SOURCE_ROOTS)
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.property.test_pure_scheduler", "0", "8"],
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert len(digests) == 1


if __name__ == "__main__":
    sys.stdout.write(digest_of(range(*map(int, sys.argv[1:]))))
