from __future__ import annotations

from types import SimpleNamespace

import pytest

from executor_service.errors import ModelUnsupported
from executor_service.model.loaded_model import choose_max_model_len


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_position_embeddings": 96}, 96),
        ({"max_target_positions": 448, "max_source_positions": 1500}, 448),
        ({"n_positions": 1024, "n_ctx": 512}, 512),
        ({"max_seq_len": 300}, 300),
        ({"max_position_embeddings": None, "max_sequence_length": 77}, 77),
        ({}, 2048),
    ],
)
def test_max_model_len_is_that_of_the_field_when_the_configuration_has_one(
    fields: dict[str, int | None], limit: int
) -> None:
    assert choose_max_model_len(SimpleNamespace(model_type="some", **fields), None) == limit


def test_max_model_len_is_refused_when_a_decoder_of_an_encoder_has_fewer_positions() -> None:
    config = SimpleNamespace(model_type="whisper", max_target_positions=448)
    with pytest.raises(ModelUnsupported, match="--max-model-len 500 is more than its 448"):
        choose_max_model_len(config, 500)
