"""Who guesses what rows will sample.

Shape letters: R rows of the step, K rows of a turn.
"""

from __future__ import annotations

from typing import Protocol

from executor_service.device.kv_cache import LayerShape
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.step import Int32Array, StepInput
from executor_service.steps.token_runs import TokenRuns


class Proposer(Protocol):
    """Guesses the next tokens of rows. A wrong guess costs time and nothing else."""

    def prepare(self, turn: StepInput, wanted: Int32Array) -> None:
        """`propose` comes next, with this; does what delays it once only. Raises nothing."""
        ...

    def propose(self, turn: StepInput, wanted: Int32Array) -> TokenRuns:
        """At most `wanted` [K] guesses of what follows the one input token of each row of `turn`.

        The block tables have the slots of all of them. Raises nothing.
        """
        ...

    def follow(self, step: StepInput, runs: TokenRuns | None) -> None:
        """`step` was computed, and its rows got `runs`; None for at most one token each.

        Raises nothing.
        """
        ...

    def catch_up(self) -> None:
        """Computes what `follow` left, if it is much, before the next step. Raises nothing."""
        ...


class LoadedProposer(Protocol):
    """Weights that guess for a model."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What they have in each block, behind the layers of the model."""
        ...

    @property
    def description(self) -> str:
        """What they are, and what runs them; for people."""
        ...

    def proposer(self, runner: ModelRunner, target: LoadedModel, max_num_tokens: int) -> Proposer:
        """What guesses for `target`, which `runner` runs, on these layers of its cache.

        `max_num_tokens`: of a step. Raises ModelUnsupported if the model turns out not to do.
        """
        ...
