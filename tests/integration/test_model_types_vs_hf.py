"""A covering sample of `make models`: every way of serving, every reason to refuse."""

from __future__ import annotations

import pytest

from tests.support.models.model_walk import check_type, known_outcomes

# The decoders' own types, those with only the parts of a Llama, windows, sinks, soft caps,
# mixtures, compressed keys, learned positions, and what is refused.
_TYPES = (
    "bloom",
    "cwm",
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "granite",
    "llama",
    "mamba",
    "ministral3",
    "roberta",
    "smollm3",
)


pytestmark = pytest.mark.usefixtures("native_library")


@pytest.mark.cases(5)
@pytest.mark.parametrize("model_type", _TYPES)
def test_model_type_is_served_as_known_or_refused(
    model_type: str,
) -> None:
    lines = check_type(model_type, known_outcomes())
    assert not [line for line in lines if line.startswith("!")], "\n".join(lines)
