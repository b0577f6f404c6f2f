"""What can be wrong with a grammar before it is compiled."""

from __future__ import annotations

from executor_service.steps.batch import BatchRefused, StepErrorReason
from executor_service.steps.executor_info import ExecutorInfo
from executor_service.steps.sampling_params import Grammar, SamplingParams
from splitserve_grammars.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

_KINDS = ("json_schema", "regex", "lark", "choices")


def check_grammar(grammar: Grammar, params: SamplingParams, info: ExecutorInfo, path: str) -> None:
    """Raises BatchRefused for sizes beyond those of the contract, or what it may not stand with."""
    if grammar.kind not in _KINDS:
        raise _malformed(path, f"has no kind; allowed: {', '.join(_KINDS)}")
    path = f"{path}.{grammar.kind}"
    num_texts = len(grammar.texts)
    if not 1 <= num_texts <= MAX_CHOICES:
        raise _malformed(path, f"has {num_texts} texts; allowed: 1 to {MAX_CHOICES}")
    num_bytes = [len(text.encode()) for text in grammar.texts]
    if min(num_bytes) == 0:
        raise _malformed(path, f"text {num_bytes.index(0)} is empty; allowed: 1 byte or more")
    if sum(num_bytes) > MAX_GRAMMAR_BYTES:
        raise _malformed(path, f"has {sum(num_bytes)} bytes; allowed: at most {MAX_GRAMMAR_BYTES}")
    if params.min_tokens > 0 or params.suppressed_token_ids:
        raise _malformed(path, "comes with min_tokens; allowed: one of them")
    if not info.model.eos_token_ids:
        raise _malformed(path, "is for a model without eos_token_ids; allowed: one that has any")


def _malformed(path: str, message: str) -> BatchRefused:
    return BatchRefused(StepErrorReason.MALFORMED, path, message)
