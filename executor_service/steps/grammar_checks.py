"""What can be wrong with a grammar before it is compiled."""

from __future__ import annotations

from executor_service.steps.batch import BatchRefused, StepErrorReason
from executor_service.steps.executor_info import ExecutorInfo
from executor_service.steps.sampling_params import Grammar, SamplingParams

_KINDS = ("json_schema", "regex", "lark", "choices")
_MAX_CHOICES = 1024
_MAX_BYTES = 65536


def check_grammar(grammar: Grammar, params: SamplingParams, info: ExecutorInfo, path: str) -> None:
    """Raises BatchRefused for sizes beyond those of the contract, or what it may not stand with."""
    if grammar.kind not in _KINDS:
        raise _malformed(path, f"has no kind; allowed: {', '.join(_KINDS)}")
    path = f"{path}.{grammar.kind}"
    num_texts = len(grammar.texts)
    if not 1 <= num_texts <= _MAX_CHOICES:
        raise _malformed(path, f"has {num_texts} texts; allowed: 1 to {_MAX_CHOICES}")
    num_bytes = [len(text.encode()) for text in grammar.texts]
    if min(num_bytes) == 0:
        raise _malformed(path, f"text {num_bytes.index(0)} is empty; allowed: 1 byte or more")
    if sum(num_bytes) > _MAX_BYTES:
        raise _malformed(path, f"has {sum(num_bytes)} bytes; allowed: at most {_MAX_BYTES}")
    if params.min_tokens > 0 or params.suppressed_token_ids:
        raise _malformed(path, "comes with min_tokens; allowed: one of them")
    if not info.model.eos_token_ids:
        raise _malformed(path, "is for a model without eos_token_ids; allowed: one that has any")


def _malformed(path: str, message: str) -> BatchRefused:
    return BatchRefused(StepErrorReason.MALFORMED, path, message)
