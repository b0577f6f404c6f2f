"""Faults of the scheduling core."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.mutant import HISTORIES, Mutant

_ENGINE = "scheduler_service.scheduler.engine."
_VALUES = "scheduler_service.scheduler.values."
_QUEUE = "scheduler_service.scheduler.queue."
_UNIT = "tests/unit/scheduler/engine/"
_MACHINE = "tests/property/test_core_state_machine.py::TestCoreMachine"
_SEVERAL = "tests/property/test_core_several_tokens.py"
_PARTS = f"{_UNIT}outcomes/test_step_parts.py"
_SHORT = f"{_UNIT}planning/test_short_prompts.py"
_TENANTS = "tests/property/test_tenants_apart.py"

CORE_MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "decoded blocks behind a public prefix are named without the tenant": Mutant(
            f"{_ENGINE}row_columns",
            "scheduling.uses_prefix_cache and not scheduling.num_public_prefix_tokens",
            "scheduling.uses_prefix_cache",
            _TENANTS,
        ),
        "shares are charged one token for a step of several": Mutant(
            f"{_ENGINE}outcomes.results",
            "each = [1] * len(row_ids) if counts is None else counts.tolist()",
            "each = [1] * len(row_ids)",
            _SEVERAL,
        ),
        "a window slides for tokens that may yet be rejected": Mutant(
            f"{_ENGINE}planning.rows",
            "num_sure = num_computed - rows.num_unsure[order]",
            "num_sure = num_computed",
            _SEVERAL,
        ),
        "a swapped row keeps tokens as computed that did not come": Mutant(
            f"{_ENGINE}outcomes.results",
            "                sequence.num_computed -= num_missing\n",
            "                pass\n",
            _SEVERAL,
        ),
        "a run is published to its last token, which is not written": Mutant(
            f"{_ENGINE}outcomes.results",
            "ends = (starts + counts) // self._block_size",
            "ends = (starts + counts + 1) // self._block_size",
            _SEVERAL,
        ),
        "tokens of parts are told again with the result": Mutant(
            f"{_ENGINE}outcomes.results",
            "        if not self._parts:\n            return outcome, sampling\n",
            "        if not self._parts or True:\n            return outcome, sampling\n",
            _PARTS,
        ),
        "blocks that a part filled are published again with the result": Mutant(
            f"{_ENGINE}outcomes.results",
            "self._parts.taken if self._parts else np.zeros_like(counts)",
            "np.zeros_like(counts)",
            _PARTS,
        ),
        "a step is planned behind a run that reports parts": Mutant(
            f"{_ENGINE}engine",
            "        return num_left is None or num_left > 1\n",
            "        return False\n",
            _PARTS,
        ),
        "a part is taken behind tokens that were not believed": Mutant(
            f"{_ENGINE}outcomes.results",
            "(part.counts > ZERO) & (parts.taken + part.counts == parts.told)",
            "part.counts > ZERO",
            _PARTS,
        ),
        "taking a step back takes one token of several": Mutant(
            f"{_ENGINE}outcomes.losses",
            "rows.num_known[sequence.row_id] = min(rows.num_known[sequence.row_id], length)",
            "rows.num_known[sequence.row_id] -= rows.num_known[sequence.row_id] > length",
            _SEVERAL,
        ),
        "a shared block is freed with its first owner": Mutant(
            f"{_ENGINE}blocks.block_pool",
            "            counts[block_id] -= 1\n",
            "            counts[block_id] = 0\n",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "the most recently used block is evicted first": Mutant(
            f"{_ENGINE}blocks.block_pool",
            "self._evictable.popitem(last=False)",
            "self._evictable.popitem(last=True)",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "a prefix is evicted before what continues it": Mutant(
            f"{_ENGINE}blocks.block_pool",
            "for block_id in reversed(block_ids):",
            "for block_id in block_ids:",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "what a lost step was to write stays findable": Mutant(
            f"{_ENGINE}outcomes.losses",
            "            self._placement.blocks.device.unpublish(block_id)\n",
            "            pass\n",
            _MACHINE,
        ),
        "the last block of a fork is not copied": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "            self.draft.moves.copy.append((table[num_full], fresh[0]))\n",
            "            pass\n",
            _MACHINE,
        ),
        "the source of a copy may be given away before the step": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "self._pin_device([table[num_full], fresh[0]])",
            "self._pin_device([fresh[0]])",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "blocks are named without the adapter": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            "        scheduling.adapter.encode(),\n",
            "",
            _TENANTS,
        ),
        "blocks are named without the salt": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            "        scheduling.cache_salt.encode(),\n",
            "",
            _TENANTS,
        ),
        "blocks are named without the tenant": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            'scheduling.tenant.encode() if is_separate else b"",',
            'b"",',
            _TENANTS,
        ),
        "blocks are named without the model": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            "        config.model_digest.encode(),\n",
            "",
            f"{_UNIT}blocks/test_prefix_cache.py",
        ),
        "blocks are named without the encoder's input": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            'b"" if encoder is None else encoder.tobytes(),',
            "",
            f"{_UNIT}blocks/test_prefix_cache.py",
        ),
        "public blocks have the names of the tenant without a name": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            'person=b"public" if is_public else b"root"',
            'person=b"root"',
            _TENANTS,
        ),
        "what is decoded is public where the prompt is shorter than what is public": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            "num_tokens = min(scheduling.num_public_prefix_tokens, "
            "request.sequence.num_prompt_tokens)",
            "num_tokens = scheduling.num_public_prefix_tokens",
            _TENANTS,
        ),
        "blocks are free while a step in flight still writes them": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "if step_id <= last_answered_step_id:",
            "if True:",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "spare blocks are taken that steps in flight write": Mutant(
            f"{_ENGINE}planning.rows",
            "            needed = rows.num_tokens[order]\n",
            "            needed = rows.num_known[order]\n",
            f"{_UNIT}planning/test_growing_rows.py",
        ),
        "drafts do not count in the budget of tokens": Mutant(
            f"{_ENGINE}planning.run_ahead",
            "num_left = self._config.max_num_batched_tokens - len(row_ids)",
            "num_left = self._config.max_num_batched_tokens",
            _SEVERAL,
        ),
        "a request of several sequences reserves one row": Mutant(
            f"{_VALUES}request",
            "return beam.width if beam is not None else len(self.unfinished)",
            "return beam.width if beam is not None else 1",
            _MACHINE,
        ),
        "a last chunk exceeds the budget by one": Mutant(
            f"{_ENGINE}planning.rows",
            "np.clip(budget - (np.cumsum(of_served) - of_served), 0, of_served)",
            "np.clip(budget + 1 - (np.cumsum(of_served) - of_served), 0, of_served)",
            _MACHINE,
        ),
        "swapped blocks go to each other's places": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "self.draft.moves.swap_out += to_host.items()",
            "self.draft.moves.swap_out += zip(to_host, reversed(to_host.values()))",
            _SEVERAL,
        ),
        "host blocks may be reused before they were brought back": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "        self.draft.moves.swap_in += to_device.items()\n"
            "        self._pin_host(host_blocks)\n",
            "        self.draft.moves.swap_in += to_device.items()\n",
            f"{_UNIT}blocks/test_block_manager.py",
        ),
        "a swapped row has computed one token more than it has": Mutant(
            f"{_ENGINE}blocks.block_manager",
            "sequence.num_computed = int(self._rows.num_computed[sequence.row_id])",
            "sequence.num_computed = int(self._rows.num_tokens[sequence.row_id])",
            _SEVERAL,
        ),
        "a swapped row keeps as computed the token that it is to be asked again": Mutant(
            f"{_ENGINE}outcomes.losses",
            "                sequence.num_computed -= 1\n",
            "                pass\n",
            f"{_UNIT}test_grammars.py",
        ),
        "a preempted sequence forgets what is promised": Mutant(
            f"{_ENGINE}row_columns",
            "sequence.num_promised = int(self.num_tokens[row_id] - self.num_known[row_id])",
            "sequence.num_promised = 0",
            f"{_UNIT}test_row_columns.py",
        ),
        "a request is admitted again before its results are in": Mutant(
            f"{_ENGINE}planning.admitter",
            "        if not self._placement.is_settled(request):\n"
            "            return AdmissionBlocker.RESULTS\n",
            "",
            f"{_UNIT}test_placement.py",
        ),
        "results of a preempted sequence are dropped": Mutant(
            f"{_ENGINE}placement",
            "                self.departures.expect_results(sequence, part)\n",
            "                pass\n",
            f"{_UNIT}test_placement.py",
        ),
        "a prompt's chunk names the block that it only begins": Mutant(
            f"{_ENGINE}placement",
            "first, end = start // block_size, (start + num_new_tokens) // block_size",
            "first, end = start // block_size, -(-(start + num_new_tokens) // block_size)",
            _MACHINE,
        ),
        "inputs refer to samples from before a snapshot": Mutant(
            f"{_ENGINE}planning.step_planner",
            "            placement.rows.forget_samples()\n",
            "",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "a refused step is followed by a delta": Mutant(
            f"{_ENGINE}engine",
            "self._needs_snapshot |= outcome.status is not StepStatus.FAILED",
            "self._needs_snapshot |= outcome.status is StepStatus.NEED_SNAPSHOT",
            _MACHINE,
        ),
        "a snapshot that was asked for counts as a loss": Mutant(
            f"{_ENGINE}engine",
            "is_fruitless = outcome.status is not StepStatus.NEED_SNAPSHOT",
            "is_fruitless = True",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "a result of another step is taken": Mutant(
            f"{_ENGINE}engine",
            "if not self._in_flight or self._in_flight[0].step_id != outcome.step_id:",
            "if not self._in_flight:",
            f"{_UNIT}outcomes/test_results.py",
        ),
        "a row that left is not removed at the executor": Mutant(
            f"{_ENGINE}step_draft",
            "            self.removed_row_ids.append(row_id)\n",
            "            pass\n",
            _SEVERAL,
        ),
        "copies of what was lost are believed": Mutant(
            f"{_ENGINE}outcomes.losses",
            "                taint.blocks |= {d for s, d in moves.copy if s in taint.blocks}\n",
            "",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "what was swapped out of a lost block is believed": Mutant(
            f"{_ENGINE}outcomes.losses",
            "                taint.host_blocks |= {d for s, d in moves.swap_out if s in "
            "taint.blocks}\n",
            "",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "tables that were given back are not looked at after a loss": Mutant(
            f"{_ENGINE}outcomes.losses",
            "return there + placement.departures.table_parts",
            "return there",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "rows are lost without those that lean on them": Mutant(
            f"{_ENGINE}outcomes.losses",
            "        taint = _Taint(set(stay_ids))\n        self._spread(plan, taint)\n",
            "        taint = _Taint(set(stay_ids))\n",
            f"{_UNIT}outcomes/test_losses.py",
        ),
        "requests of one priority preempt each other": Mutant(
            f"{_QUEUE}queue_policy",
            "waiting.scheduling.priority < running.scheduling.priority",
            "waiting.scheduling.priority <= running.scheduling.priority",
            "tests/property/test_queue_policies.py",
        ),
        "who had its turn is preempted all the same": Mutant(
            f"{_QUEUE}waiting_queue",
            "return not running.is_protected and self._policy",
            "return self._policy",
            "tests/property/test_queue_policies.py",
        ),
        "nobody has a turn": Mutant(
            f"{_QUEUE}key_order",
            "return self.waiting.first() if self.num_since >= TURN_EVERY else None",
            "return None",
            "tests/property/test_queue_policies.py",
        ),
        "the most urgent row yields first": Mutant(
            f"{_ENGINE}row_columns",
            "return self.sequence(self._row_order[-1])",
            "return self.sequence(self._row_order[0])",
            f"{_UNIT}planning/test_growing_rows.py",
        ),
        "a short prompt takes all tokens of a step": Mutant(
            f"{_ENGINE}planning.step_limits",
            "return max(num_prompt_tokens, 0) // _PART_FOR_SHORTEST",
            "return max(num_prompt_tokens, 0)",
            _SHORT,
        ),
        "long prompts are passed by short ones without end": Mutant(
            f"{_ENGINE}planning.admitter",
            "request.num_bypasses >= self._pool_bypasses or len(passed) == _MAX_LONG",
            "not self._pool_bypasses or len(passed) == _MAX_LONG",
            _SHORT,
        ),
        "cached tokens make a prompt long": Mutant(
            f"{_ENGINE}planning.admitter",
            "return len(leader.token_ids) - num_cached <= part.max_pending",
            "return False",
            _SHORT,
        ),
        "a short prompt begins beside more urgent ones": Mutant(
            f"{_ENGINE}planning.admitter",
            "if self._queue.step_class(request) > part.step_class:",
            "if False:",
            _SHORT,
        ),
        "sequences grow longer when their siblings have ended": Mutant(
            f"{_ENGINE}planning.arrival_checks",
            "request.num_rows_wanted if has_beams else len(request.sequences)",
            "request.num_rows_wanted",
            f"{_UNIT}planning/test_arrival_checks.py",
        ),
        "a deadline is refused one step too early": Mutant(
            f"{_ENGINE}planning.lateness",
            "num_decode_steps = max(least - num_known, 1) - 1",
            "num_decode_steps = max(least - num_known, 1)",
            "tests/property/test_deadlines.py",
        ),
        "a request pays again when it comes back": Mutant(
            f"{_QUEUE}tenant_order",
            "        if request.request_id in self._begun:\n            return\n",
            "",
            "tests/property/test_fair_share.py",
        ),
        "service is saved up by not asking for it": Mutant(
            f"{_QUEUE}tenant_order",
            "account.counter = max(account.counter, self._level())",
            "account.counter += 0",
            "tests/property/test_fair_share.py",
        ),
        "weights do not count": Mutant(
            f"{_QUEUE}tenant_order",
            "OUTPUT_WEIGHT * num_tokens * account.price",
            "OUTPUT_WEIGHT * num_tokens",
            "tests/property/test_fair_share.py",
        ),
        "tokens of a preempted sequence are nobody's": Mutant(
            f"{_ENGINE}outcomes.results",
            "            self.charge_tenant(sequence.request.scheduling.tenant, len(token_ids))\n",
            "",
            _SEVERAL,
        ),
        "who has most does not yield first": Mutant(
            f"{_ENGINE}planning.room",
            "return max(order_keys, key=order_keys.__getitem__)",
            "return min(order_keys, key=order_keys.__getitem__)",
            f"{_UNIT}planning/test_tenant_limits.py",
        ),
        "sequences of a request share one seed": Mutant(
            f"{_VALUES}request",
            "seed_of_sequence = sequence_seed(seed, index)",
            "seed_of_sequence = seed",
            f"{_UNIT}test_request.py",
        ),
        "a sequence joins what its sibling has yet to compute": Mutant(
            f"{_ENGINE}sequences",
            "return (best, most) if self._rows.num_computed[best.row_id] >= most else (None, 0)",
            "return (best, most)",
            _MACHINE,
        ),
        "a beam search refuses its end one token too long": Mutant(
            f"{_VALUES}beam_search",
            "if self._num_tokens < self._min_tokens else",
            "if self._num_tokens <= self._min_tokens else",
            f"{_UNIT}test_beam_search.py",
        ),
        "a sequence that ended counts as one that goes on": Mutant(
            f"{_ENGINE}sequences",
            "        if not request.unfinished:\n            self._complete(request)\n",
            "        if not request.unfinished and request.sequences[0] is not sequence:\n"
            "            self._complete(request)\n",
            _MACHINE,
        ),
        "a sequence is one token too long": Mutant(
            f"{_ENGINE}planning.arrival_checks",
            "by_length = sequence.num_prompt_tokens + request.params.max_tokens",
            "by_length = sequence.num_prompt_tokens + request.params.max_tokens + 1",
            _MACHINE,
        ),
        "a row runs on to its last token": Mutant(
            f"{_ENGINE}row_columns",
            "self.run_limit[row_ids] = np.minimum(num_slots, self.stop_len[row_ids] - ONE)",
            "self.run_limit[row_ids] = np.minimum(num_slots, self.stop_len[row_ids])",
            _MACHINE,
        ),
        "a resumed request with all its tokens runs on": Mutant(
            f"{_ENGINE}planning.admitter",
            "if resumed.num_output_tokens > 0 and request.params.beam is None:",
            "if resumed.num_output_tokens > 1 and request.params.beam is None:",
            _MACHINE,
        ),
        "prompt logprobs are told again after a recompute": Mutant(
            f"{_ENGINE}outcomes.results",
            "if token.position > request.num_prompt_logprobs_sent]",
            "if token.position >= request.num_prompt_logprobs_sent]",
            _MACHINE,
        ),
        "an evacuated second sequence of whole blocks loses its last token": Mutant(
            f"{_ENGINE}outcomes.losses",
            "        token_ids=placement.known_tokens(sequence).copy(),\n",
            "        token_ids=placement.known_tokens(sequence)[\n"
            "            : None\n"
            "            if sequence.index == 0 or len(placement.known_tokens(sequence)) "
            "% placement.rows.block_size\n"
            "            else -1\n"
            "        ].copy(),\n",
            _SEVERAL,
        ),
        "a resumed sequence of more than 48 tokens loses one": Mutant(
            f"{_VALUES}request",
            "tokens = np.concatenate([prompt, token_array(resume_token_ids[index])])",
            "tokens = np.concatenate([prompt, token_array(resume_token_ids[index])])\n"
            "                tokens = tokens[: -1 if len(tokens) > 48 else None]",
            _SEVERAL,
        ),
        "an aborted request still gets what its steps in flight sample": Mutant(
            f"{_ENGINE}placement",
            "        self.departures.ignore_results(sequence)\n        is_ending",
            "        is_ending",
            "tests/unit/scheduler/scheduler/test_retries.py",
        ),
        "what a run did not bring is still promised": Mutant(
            f"{_ENGINE}outcomes.results",
            "            sequence.num_promised -= num_missing\n",
            "            pass\n",
            f"{_UNIT}planning/test_run_ahead.py",
        ),
        "plans behind a short run are not moved back": Mutant(
            f"{_ENGINE}outcomes.results",
            "            self._move_back(plan.work, missing_of)\n",
            "            pass\n",
            _SEVERAL,
        ),
        "suspects are tried in groups of the same size": Mutant(
            f"{_ENGINE}suspects",
            "request.trial_size = min(size, request.trial_size or size)",
            "request.trial_size = len(unfinished)",
            f"{_UNIT}test_suspects.py",
        ),
        "a request from quarantine is acquitted by its first token": Mutant(
            f"{_ENGINE}suspects",
            "if request.num_trials_left <= 1:",
            "if True:",
            f"{_UNIT}test_suspects.py",
        ),
        "a trial shares the executor with other steps": Mutant(
            f"{_ENGINE}engine",
            "            if turn.is_trial and self._in_flight:\n                return None\n",
            "",
            f"{_UNIT}test_suspects.py",
        ),
        "a lost core keeps a request": Mutant(
            f"{_ENGINE}engine",
            "return evacuate(self.placement, self.requests_in_flight)",
            "return evacuate(self.placement, self.requests_in_flight)[1:]",
            f"{HISTORIES}lost",
        ),
        "a failed step is believed": Mutant(
            f"{_ENGINE}outcomes.losses",
            "        self._discard(taint, is_fruitless=is_fruitless)\n",
            "        pass\n",
            f"{HISTORIES}failing",
        ),
        "blocks are never freed": Mutant(
            f"{_ENGINE}blocks.block_pool",
            "for block_id in reversed(block_ids):",
            "for block_id in ():",
            f"{HISTORIES}random_scenario",
        ),
        "prefixes are taken for others": Mutant(
            f"{_ENGINE}blocks.prefix_cache",
            "return blake2b(parent + token_data).digest()",
            "return blake2b(parent).digest()",
            f"{HISTORIES}random_scenario",
        ),
        "a core whose grammars compile is not asked again": Mutant(
            f"{_ENGINE}engine",
            "return self._planner.ask_again_at_ns",
            "return None",
            f"{HISTORIES}burst",
        ),
        "tokens that did not come are counted on": Mutant(
            f"{_ENGINE}outcomes.results",
            "        assert num_more is not None\n",
            "        return\n",
            f"{HISTORIES}growing",
        ),
        "a core decides by what is not recorded": Mutant(
            f"{_ENGINE}planning.run_ahead",
            "most = min(most, self.most_tokens)",
            'whims = globals().setdefault("whims", iter((1, 0, 1, 1, 0) * 100_000))\n'
            "        most = min(most, self.most_tokens) * next(whims)",
            f"{HISTORIES}recorded",
        ),
    }
)
