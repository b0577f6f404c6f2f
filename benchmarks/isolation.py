"""Tenants apart: what an attacker does to the time to first token of another tenant, end to end.

A gateway, a scheduler and several executors, which compute nothing and take as long for each step
as its rows and prompt tokens say; each is a real process. `steady` asks for little, at a random but
steady rate. `attacker` keeps more requests open than there is room for, in one of several ways; and
then, in the run that it is compared with, asks just for what it got of that: the same load,
politely. `moved`: p99 time to first token of `steady` under the attack by that at the same load; at
most 1.3 is the aim. `failed`: requests of `steady` without an answer. One JSON object for each run
and one for each attack. Times are real ones: measure on a machine that does nothing else.

With `--virtual` the queue and the cores alone decide, in virtual time: the figures are the same on
any machine, and say nothing of the gateway and of clients that do not read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.http import stack
from benchmarks.http_load import encode
from benchmarks.isolation_executors import PROMPT_TOKEN_S, ROW_S, STEP_S
from benchmarks.letters_executor import MODEL
from benchmarks.report import emit, percentile
from scheduler_service.scheduler.values import PreemptionMode, SchedulerConfig
from tests.support.core.virtual_fleet import Arrival, StepCosts, VirtualFleet, random_arrivals

_STEADY, _ATTACKER = "steady", "attacker"
_STEADY_PER_S = 6.0
_WARM_UP_S = 10.0
_NUM_ROWS = 64
_NUM_BLOCKS = 1280
_NUM_HOST_BLOCKS = 2560
# What a client that does not read takes from its connection before it stops.
_UNREAD_BYTES = 2048


@dataclass(frozen=True)
class _Attack:
    """What `attacker` asks for, and how many requests it keeps open at a time.

    `per_s`: in virtual time, how often it asks instead; more than there is room for.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_open: int
    per_s: float
    n: int = 1
    reads: bool = True


_ATTACKS = {
    "flood": _Attack(512, 64, 400, 80.0),
    "swapped": _Attack(16, 1000, 300, 12.0),
    "giants": _Attack(12_000, 64, 24, 4.0),
    "slow readers": _Attack(16, 400, 300, 25.0, reads=False),
    "n=64": _Attack(32, 64, 24, 6.0, n=64),
}


@dataclass(slots=True)
class _Answer:
    """What came of a request; `first_s`: from sending to its first event, None if there is none."""

    is_done: bool = False
    first_s: float | None = None


class _Tenant:
    """Sends streamed completions as one tenant."""

    def __init__(self, http: str, name: str, seed: int) -> None:
        self._http = http
        self._name = name
        self.random = random.Random(seed)
        self.num_done = 0

    async def ask(
        self, num_prompt_tokens: int, num_output_tokens: int, n: int = 1, *, reads: bool = True
    ) -> _Answer:
        """Asks for a completion, with a prompt that nobody else has."""
        body = {
            "model": MODEL,
            "prompt": [self.random.randrange(26) for _ in range(num_prompt_tokens)],
            "max_tokens": num_output_tokens,
            "n": n,
            "user": self._name,
            "temperature": 1.0,
            "stream": True,
        }
        answer = _Answer()
        host, _, port = self._http.rpartition(":")
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_UNREAD_BYTES)
            try:
                sent_s = time.perf_counter()
                writer.write(encode("/v1/completions", body, self._http))
                received = b""
                while chunk := await reader.read(1 << 16):
                    if answer.first_s is None and b"data: {" in chunk:
                        answer.first_s = time.perf_counter() - sent_s
                    if answer.first_s is not None and not reads:
                        # Until the server gives up, or the run is over.
                        await asyncio.sleep(3600)
                    received = received[-64:] + chunk
                    if received.endswith(b"0\r\n\r\n"):
                        break
                answer.is_done = answer.first_s is not None
            finally:
                writer.transport.abort()
        self.num_done += answer.is_done
        return answer


async def _keep_open(tenant: _Tenant, attack: _Attack) -> None:
    """Asks again as soon as an answer is there; whoever does not read lets go after a while."""
    while True:
        asked = tenant.ask(
            attack.num_prompt_tokens, attack.num_output_tokens, attack.n, reads=attack.reads
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(None if attack.reads else tenant.random.uniform(5, 15)):
                if not (await asked).is_done:
                    await asyncio.sleep(0.2)  # it was refused
        tenant.num_done += not attack.reads


async def _at_random(
    per_s: float, tenant: _Tenant, ask: Callable[[], Coroutine[None, None, _Answer]]
) -> list[_Answer]:
    """Asks at random times, until cancelled; returns all answers, also those not there yet."""
    answers: list[asyncio.Task[_Answer]] = []
    try:
        while True:
            await asyncio.sleep(tenant.random.expovariate(per_s))
            answers.append(asyncio.create_task(ask()))
    except asyncio.CancelledError:
        await asyncio.wait(answers, timeout=10.0)
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    return [_Answer() if each.cancelled() else each.result() for each in answers]


async def _run(http: str, attack: _Attack, per_s: float | None, seconds: float) -> dict[str, float]:
    """What became of `steady`; `per_s`: how often `attacker` asks, None for an attack."""
    steady, attacker = _Tenant(http, _STEADY, 1), _Tenant(http, _ATTACKER, 2)

    async def polite() -> _Answer:
        return await attacker.ask(attack.num_prompt_tokens, attack.num_output_tokens, attack.n)

    others: list[asyncio.Task[object]] = []
    if per_s is None:
        attacking = (_keep_open(attacker, attack) for _ in range(attack.num_open))
        others += map(asyncio.create_task, attacking)
    else:
        others.append(asyncio.create_task(_at_random(max(per_s, 0.01), attacker, polite)))
    warm_up_s = _WARM_UP_S + attack.num_output_tokens * 0.02
    warming = asyncio.create_task(_at_random(_STEADY_PER_S, steady, lambda: steady.ask(64, 32)))
    await asyncio.sleep(warm_up_s)
    num_before = attacker.num_done
    measuring = asyncio.create_task(_at_random(_STEADY_PER_S, steady, lambda: steady.ask(64, 32)))
    warming.cancel()
    await asyncio.sleep(seconds)
    num_done = attacker.num_done - num_before
    measuring.cancel()
    answers = await measuring
    for task in (*others, warming):
        task.cancel()
    await asyncio.gather(*others, warming, return_exceptions=True)
    first_ms = [1e3 * answer.first_s for answer in answers if answer.first_s is not None]
    return {
        "ttft_ms_p50": percentile(first_ms, 50),
        "ttft_ms_p99": percentile(first_ms, 99),
        "requests": len(answers),
        "failed": len(answers) - len(first_ms),
        "attacker_done_per_s": round(num_done / seconds, 2),
    }


def _measure(name: str, policy: str, num_executors: int, seconds: float) -> None:
    """The attack, and the same load; each with processes of its own."""
    attack, per_s, p99_ms = _ATTACKS[name], None, dict[str, float]()
    pools = (str(size) for size in (num_executors, _NUM_ROWS, _NUM_BLOCKS, _NUM_HOST_BLOCKS))
    executors = ["benchmarks.isolation_executors", "{scheduler}", *pools]
    options = ["--queue-policy", policy, "--max-num-batched-tokens", "2048"]
    options += ["--preemption-mode", "swap"]
    for load in ("attack", "same load"):
        with stack(executors, _NUM_ROWS, options) as (http, _):
            values = asyncio.run(_run(http, attack, per_s, seconds))
        load_average = round(os.getloadavg()[0], 1)
        emit(
            "isolation", attack=name, policy=policy, load=load, **values, load_average=load_average
        )
        per_s, p99_ms[load] = values["attacker_done_per_s"], values["ttft_ms_p99"]
    moved = round(p99_ms["attack"] / p99_ms["same load"], 2)
    emit("isolation_moved", attack=name, policy=policy, executors=num_executors, moved=moved)


def _measure_virtually(name: str, policy: str, num_executors: int, seconds: float) -> None:
    """The same in virtual time, without gateway and processes."""
    attack, p99_ms = _ATTACKS[name], dict[str, float]()
    until_us, per_s = int(seconds * 1e6), attack.per_s
    costs = StepCosts(int(1e6 * STEP_S), int(1e6 * ROW_S), int(1e6 * PROMPT_TOKEN_S))
    config = SchedulerConfig(
        block_size=16,
        num_device_blocks=_NUM_BLOCKS,
        num_host_blocks=_NUM_HOST_BLOCKS,
        block_bytes=1,
        max_num_seqs=_NUM_ROWS,
        max_num_batched_tokens=2048,
        max_model_len=1 << 16,
        max_num_waiting=1024,
        vocab_size=1 << 20,
        eos_token_ids=frozenset(),
        queue_policy=policy,
        preemption_mode=PreemptionMode.SWAP,
    )
    for load in ("attack", "same load"):
        prompt, output = attack.num_prompt_tokens, attack.num_output_tokens
        arrivals = [
            *_random_arrivals(_STEADY, _STEADY_PER_S, until_us, 64, 32),
            *_random_arrivals(_ATTACKER, per_s, until_us, prompt, output, attack.n),
        ]
        fates = VirtualFleet(config, [costs] * num_executors).run(arrivals, until_us)
        measured = [
            fate
            for fate in fates
            if fate.arrival.tenant == _STEADY
            and _WARM_UP_S * 1e6 < fate.arrival.at_us < until_us - 5_000_000
        ]
        first_ms = [fate.ttft_us / 1e3 for fate in measured if fate.ttft_us is not None]
        others = (fate for fate in fates if fate.arrival.tenant == _ATTACKER)
        per_s = round(sum(fate.finished_us is not None for fate in others) / seconds, 2)
        p99_ms[load] = percentile(first_ms, 99)
        emit(
            "isolation_virtual",
            attack=name,
            policy=policy,
            load=load,
            ttft_ms_p50=percentile(first_ms, 50),
            ttft_ms_p99=p99_ms[load],
            requests=len(measured),
            failed=len(measured) - len(first_ms),
            attacker_done_per_s=per_s,
        )
    moved = round(p99_ms["attack"] / p99_ms["same load"], 2)
    emit("isolation_virtual_moved", attack=name, policy=policy, moved=moved)


def _random_arrivals(
    tenant: str, per_s: float, until_us: int, prompt: int, output: int, n: int = 1
) -> list[Arrival]:
    return random_arrivals(
        tenant,
        per_s,
        until_us,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        seed=len(tenant),
        num_sequences=n,
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--executors", type=int, default=3)
    parser.add_argument("--attack", choices=sorted(_ATTACKS), nargs="*", default=list(_ATTACKS))
    parser.add_argument("--policy", choices=("fair", "fcfs"), nargs="*", default=["fair"])
    parser.add_argument("--virtual", action="store_true", help="decisions alone, in virtual time")
    arguments = parser.parse_args()
    measure = _measure_virtually if arguments.virtual else _measure
    for name in arguments.attack:
        for policy in arguments.policy:
            measure(name, policy, arguments.executors, arguments.seconds)


if __name__ == "__main__":
    main()
