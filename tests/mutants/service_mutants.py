"""Faults of executors, fleet, streams, journals, clients and the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tests.mutants.mutant import HISTORIES, Mutant

_SCHEDULER = "tests/unit/scheduler/scheduler/"
_STEPS = "tests/unit/executor/steps/"
_REFUSALS = "tests/contract/test_refusals.py"

EXECUTOR_MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "tables of rows are not extended": Mutant(
            "executor_service.steps.row_table",
            "        self.tables.write(*columns)\n",
            "        pass\n",
            f"{HISTORIES}random_scenario",
        ),
        "rows go on where they would be at most": Mutant(
            "executor_service.steps.row_table",
            "positions = np.minimum(self._last_positions[lines, row_ids], most)",
            "positions = most",
            f"{HISTORIES}growing",
        ),
        "drafts are believed": Mutant(
            "executor_service.steps.drafts",
            "                and before == inputs[line]\n",
            "",
            f"{HISTORIES}growing",
        ),
        "a draft behind the end of a sequence is taken": Mutant(
            "executor_service.steps.drafts",
            "                and before not in rows.sampling_params[line].stop_token_ids\n",
            "",
            f"{_STEPS}test_drafts.py",
        ),
        "a row runs on behind its end": Mutant(
            "executor_service.steps.drafts",
            "            if tokens[-1] in self._step.sampling_params[row].stop_token_ids:\n"
            "                self._num_left[row] = 0\n",
            "",
            "tests/property/test_core_state_machine.py::TestRunAheadMachine",
        ),
        "a run goes on while a batch waits": Mutant(
            "executor_service.service.step_worker",
            "        if not is_alone or not self._jobs.empty():\n            return False\n",
            "",
            "tests/contract/test_parts.py",
        ),
        "a part has the tokens of the part before": Mutant(
            "executor_service.service.part_reports",
            "runs if self._num_sent is None else runs.behind(self._num_sent)",
            "runs",
            "tests/unit/executor/service/test_part_reports.py",
        ),
        "a stale scheduler is obeyed": Mutant(
            "executor_service.steps.step_executor",
            "if identity.scheduler_epoch < newest_epoch:",
            "if False:",
            "tests/contract/test_identity.py",
        ),
        "a batch for another life of the executor is taken": Mutant(
            "executor_service.steps.step_executor",
            "if identity.executor_epoch != executor_epoch:",
            "if False:",
            f"{_STEPS}test_step_executor.py",
        ),
        "a repeated step is computed again": Mutant(
            "executor_service.steps.step_executor",
            "if last_step_id is not None and step_id <= last_step_id:",
            "if last_step_id is not None and step_id < last_step_id:",
            "tests/contract/test_identity.py",
        ),
        "a delta is applied to rows that it was not made for": Mutant(
            "executor_service.steps.step_executor",
            "if identity.base_step_id is not None and identity.base_step_id != base_step_id:",
            "if False:",
            f"{_STEPS}test_step_executor.py",
        ),
        "a row has the samples of the one before it": Mutant(
            "executor_service.steps.row_table",
            "        self.sampled.forget_rows(row_ids)\n",
            "",
            "tests/contract/test_rows.py",
        ),
        "slots behind the input are not looked at": Mutant(
            "executor_service.steps.batch_checks",
            "num_written = work.num_new_tokens if num_more is None else work.num_new_tokens"
            " + num_more",
            "num_written = work.num_new_tokens",
            _REFUSALS,
        ),
        "two moves go to one block": Mutant(
            "executor_service.steps.batch_checks",
            "    check_distinct_blocks(moves.destinations, destination_path)\n",
            "",
            _REFUSALS,
        ),
        "a table ends where it was written last": Mutant(
            "executor_service.steps.block_tables",
            "self.lengths[rows] = np.maximum(self.lengths.take(rows), ends)",
            "self.lengths[rows] = ends",
            "tests/property/test_resident_tables.py",
        ),
        "a device misses a write of tables": Mutant(
            "executor_service.steps.block_tables",
            "for back in range(num_missed, 0, -1)]",
            "for back in range(num_missed - 1, 0, -1)]",
            "tests/property/test_resident_tables.py",
        ),
        "random numbers do not depend on the position": Mutant(
            "executor_service.sampling.sampler",
            "counter = (positions & _WORD, (positions >> 32) & _WORD, zero, zero)",
            "counter = (zero, (positions >> 32) & _WORD, zero, zero)",
            "tests/unit/executor/sampling",
        ),
        "random numbers are those of the token before": Mutant(
            "executor_service.sampling.sampler",
            "to_device(rows.positions[random_rows].astype(np.int64), device),",
            "to_device(rows.positions[random_rows].astype(np.int64) - 1, device),",
            "tests/unit/executor/sampling",
        ),
    }
)

_CLIENT = "splitserve_client.resumable_request"

_FORGETFUL_GATEWAY = Mutant(
    "splitserve_gateway.upstreams.upstream_request",
    "resume_token_ids=self._came.outputs,",
    "resume_token_ids={i: t[:-1] for i, t in self._came.outputs.items()},",
    "tests/unit/gateway/upstreams/test_fleet.py",
)

_REPLAY = "tests/unit/gateway/generation/test_replay.py"

SERVICE_MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "what a drained executor has is forgotten": Mutant(
            "scheduler_service.scheduler.scheduler",
            "        self._take_back(executor, moved)\n",
            "",
            f"{HISTORIES}drained",
        ),
        "results say nothing of executors": Mutant(
            "scheduler_service.scheduler.health",
            "if outcome.status is StepStatus.NEED_SNAPSHOT or not is_expected:",
            "if outcome.status:",
            f"{HISTORIES}one_sick",
        ),
        "more steps are in flight than the executor takes": Mutant(
            "scheduler_service.executors.membership",
            "min(self._config.pipeline_depth, info.limits.max_inflight_steps)",
            "self._config.pipeline_depth",
            "tests/unit/scheduler/executors/test_membership.py",
        ),
        "the one queue is in order of arrival": Mutant(
            "scheduler_service.scheduler.scheduler",
            "make_queue_policy(config.queue_policy, config.tenant_weights)",
            'make_queue_policy("fcfs", config.tenant_weights)',
            f"{HISTORIES}contended",
        ),
        "no preempted request moves to an idle executor": Mutant(
            "scheduler_service.scheduler.preempted_moves",
            "executor.address not in self.givers and self._routing.has_room(executor)",
            "False",
            f"{_SCHEDULER}test_retries.py",
        ),
        "the queue does not learn what tenants got": Mutant(
            "scheduler_service.scheduler.scheduler",
            "        self.queue.charge(events.num_sampled)  # before planning the next step\n",
            "        pass\n",
            f"{_SCHEDULER}test_one_queue.py",
        ),
        "a large request waits for no executor": Mutant(
            "scheduler_service.scheduler.routing.routing",
            "        return reserved is executor\n",
            "        return False\n",
            f"{_SCHEDULER}test_one_queue.py",
        ),
        "a large request waits for every executor": Mutant(
            "scheduler_service.scheduler.routing.routing",
            "        return reserved is executor\n",
            "        return True\n",
            f"{_SCHEDULER}test_one_queue.py",
        ),
        "everybody in flight was alone when an executor is lost": Mutant(
            "scheduler_service.scheduler.quarantine",
            "is_alone=len(names) == 1)",
            "is_alone=True)",
            "tests/property/test_quarantine.py",
        ),
        "who was recalled from an executor is not accused when it dies": Mutant(
            "scheduler_service.scheduler.engine.engine",
            "gone = {part.request_id for part in self.placement.departures.table_parts}",
            "gone = set[str]()",
            "tests/property/test_poison_in_a_fleet.py",
        ),
        "a trial does not make up for results that were lost": Mutant(
            "scheduler_service.scheduler.quarantine",
            "losses.num_gained + loss.num_steps",
            "losses.num_gained + 1",
            "tests/property/test_poison_in_a_fleet.py",
        ),
        "a request is isolated one loss too late": Mutant(
            "scheduler_service.scheduler.quarantine",
            "elif len(losses.in_succession) >= num_until_isolated:",
            "elif len(losses.in_succession) > num_until_isolated:",
            "tests/unit/scheduler/scheduler/test_quarantine.py",
        ),
        "tokens of all streams go to the first": Mutant(
            "scheduler_service.streams.delivery",
            "if np.count_nonzero(numbers == first) == len(numbers):",
            "if True:",
            "tests/unit/scheduler/streams/test_delivery.py",
        ),
        "tokens of a stream come in the wrong order": Mutant(
            "scheduler_service.streams.delivery",
            'order = np.argsort(numbers, kind="stable")',
            'order = np.argsort(numbers[::-1], kind="stable")[::-1]',
            "tests/unit/scheduler/streams/test_delivery.py",
        ),
        "a journal says that an executor was sent one step more": Mutant(
            "scheduler_service.journal.event_codec",
            "message.last_step_id = event.last_step_id",
            "message.last_step_id = event.last_step_id + 1",
            "tests/property/test_record_replay.py",
        ),
        "a scheduler is written down without the last token of its rows": Mutant(
            "scheduler_service.journal.checkpoint",
            '"token_ids": [(row_id, rows.known_tokens(row_id)) for row_id in running],',
            '"token_ids": [(row_id, rows.known_tokens(row_id)[:-1]) for row_id in running],',
            "tests/property/test_scheduler_restored.py",
        ),
        "a client forgets its tokens": Mutant(
            _CLIENT,
            "        self._outputs[0].append(token_id)\n",
            "        pass\n",
            f"{HISTORIES}cut_off",
        ),
        "a client tells twice what it had before a break": Mutant(
            _CLIENT,
            "        self._held.clear()\n",
            "",
            f"{HISTORIES}of_the_best",
        ),
        "a client resumes the first sequence only": Mutant(
            _CLIENT,
            "            if token_ids:\n",
            "            if token_ids and index == 0:\n",
            "tests/unit/client/test_several_sequences.py",
        ),
        "a client tells scores of the prompt twice": Mutant(
            _CLIENT,
            "        del tokens.prompt_logprobs[:num_known]\n",
            "",
            "tests/unit/client/test_resumable_request.py",
        ),
        "a gateway forgets one token on resumption": _FORGETFUL_GATEWAY,
        "a gateway forgets one token on resumption, in virtual time": replace(
            _FORGETFUL_GATEWAY, killer=f"{HISTORIES}through_gateways"
        ),
        "a gateway forgets one token on resumption, among real processes": replace(
            _FORGETFUL_GATEWAY, killer="tests/chaos/test_faults.py"
        ),
        "a resumed stream repeats an event": Mutant(
            "splitserve_gateway.generation.stream_places",
            "            self._num_known = self.resumed.number\n",
            "            self._num_known = self.resumed.number - 1\n",
            _REPLAY,
        ),
        "a resumed stream has steps of its own": Mutant(
            "splitserve_gateway.generation.replay",
            "    length = len(tokens.token_ids) + (tokens.finish is not None)\n",
            "    length = len(tokens.token_ids)\n",
            _REPLAY,
        ),
        "output is kept for ever": Mutant(
            "scheduler_service.streams.kept_outputs",
            " or output.until_ns <= self._now_ns()",
            "",
            "tests/unit/scheduler/streams/test_kept_outputs.py",
        ),
        "a gateway goes on with other randomness": Mutant(
            "splitserve_gateway.upstreams.upstream_request",
            "        if params.seed is None and params.pooling is None:\n",
            "        if False:\n",
            "tests/unit/gateway/upstreams/test_fleet.py",
        ),
    }
)
