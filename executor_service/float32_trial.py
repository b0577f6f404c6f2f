"""Tries what a model's layers compute, in float32 whatever it is served in, at far positions too.

The truth is always the forward pass of `transformers` itself, on the same tokens and positions.

Shape letters: Q probe sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from executor_service.attention import IMPLEMENTATION_NAME
from executor_service.logit_error import relative_error
from executor_service.model_cut import cut_to_float32
from executor_service.probe_tokens import ProbeTokens, far_tokens, near_tokens


@dataclass(frozen=True, slots=True)
class Trial:
    """A cut of a model, see `cut_to_float32`; what it is asked, and its own answers [Q, L, V].

    `cut` is switched to our attention.
    """

    cut: Any
    questions: tuple[ProbeTokens, ...]
    answers: tuple[Tensor, ...]

    def error(self, compute: Callable[[ProbeTokens], Tensor]) -> float:
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
) -> Trial | None:
    """What is to be computed in the place of `model`; None if there is no memory to find out.

    `attention_modules`: those of `model` that attend. `prepare` changes the cut before it is asked;
    it answers inside `answering`.
    """
    cut = cut_to_float32(model, attention_modules)
    if cut is None:
        return None
    prepare(cut)
    text_config = cut.config.get_text_config(decoder=True)
    near = near_tokens(cut, text_config, max_model_len)
    far = far_tokens(cut, text_config, max_model_len)
    cut.set_attn_implementation("eager")
    with answering(cut):
        # Without positions, as people call it: the model decides where the first token stands.
        near_output = cut(input_ids=near.tokens, use_cache=True)
        far_output = cut(input_ids=far.tokens, position_ids=far.position_ids, use_cache=False)
    answers = near_output.logits.float(), far_output.logits.float()
    cut.set_attn_implementation(IMPLEMENTATION_NAME)
    return Trial(cut, (near, far), answers)
