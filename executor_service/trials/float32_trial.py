"""Tries what a model's layers compute, in float32 whatever it is served in, at far positions too.

The truth is always the forward pass of `transformers` itself, on the same tokens and positions.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from executor_service.model.transformers_attention import IMPLEMENTATION_NAME
from executor_service.trials.logit_error import relative_error
from executor_service.trials.model_cut import cut_to_float32
from executor_service.trials.trial_tokens import TrialTokens, far_tokens, near_tokens


@dataclass(frozen=True, slots=True)
class Trial:
    """A model that is small or cut, what it is asked, and its own answers [Q, L, V].

    `model` is switched to our attention.
    """

    model: Any
    questions: tuple[TrialTokens, ...]
    answers: tuple[Tensor, ...]

    def error(self, compute: Callable[[TrialTokens], Tensor]) -> float:
        """The largest error of what `compute` says of the questions, [Q, L, V] each."""
        errors = [
            relative_error(answer, compute(question)[..., : answer.shape[-1]])
            for question, answer in zip(self.questions, self.answers, strict=True)
        ]
        # `max` would lose a NaN behind a number.
        return next((error for error in errors if error != error), max(errors))


def float32_trial(
    model: Any,  # noqa: ANN401
    attention_modules: Iterable[nn.Module],
    max_model_len: int,
    prepare: Callable[[Any], None] = lambda _cut: None,
    answering: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    passed: int = 0,
) -> Trial | None:
    """A trial of a cut of `model` in float32; None if there is no memory for one.

    `attention_modules`: those of `model` that attend. `prepare` changes the cut before it is asked;
    it answers inside `answering`. `passed`: as `near_tokens` has it.
    """
    cut = cut_to_float32(model, attention_modules)
    if cut is None:
        return None
    prepare(cut)
    return trial_of(cut, max_model_len, answering, passed)


def trial_of(
    model: Any,  # noqa: ANN401
    max_model_len: int,
    answering: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    passed: int = 0,
) -> Trial:
    """Asks `model`, which answers inside `answering`, attending as `transformers` does."""
    text_config = model.config.get_text_config(decoder=True)
    near = near_tokens(model, text_config, max_model_len, passed)
    far = far_tokens(model, text_config, max_model_len)
    # Every model has it, and it leaves nothing out.
    model.set_attn_implementation("eager")
    with answering(model):
        # Without positions, as people call it: the model decides where the first token stands.
        near_output = model(input_ids=near.tokens, use_cache=True)
        far_output = model(input_ids=far.tokens, position_ids=far.position_ids, use_cache=False)
    answers = near_output.logits.float(), far_output.logits.float()
    model.set_attn_implementation(IMPLEMENTATION_NAME)
    return Trial(model, (near, far), answers)
