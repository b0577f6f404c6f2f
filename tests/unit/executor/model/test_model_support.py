"""Models of transformers as they are served: attention, layers, positions; progress of loading."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor_service.backends import choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import KVCache
from executor_service.errors import ModelUnsupported
from executor_service.model import (
    IMPLEMENTATION_NAME,
    LayerStates,
    RevealingModel,
    TransformersModel,
    bind,
    build_input_batch,
    choose_max_model_len,
    register_attention,
    show_progress,
    unbind,
)
from executor_service.runner import CacheConfig, build_runner
from splitserve_kernels.paged_batch import AttentionOptions
from tests.support.devices.recorded_ops import RecordedOps
from tests.support.models.tiny_heads import LAYER_IDS, states_of
from tests.support.models.tiny_models import VOCAB_SIZE, load_tiny_model, make_tiny_model
from tests.support.steps.step_driver import Row, make_step


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
def test_max_model_len_is_read_from_any_known_field(
    fields: dict[str, int | None], limit: int
) -> None:
    assert choose_max_model_len(SimpleNamespace(model_type="some", **fields), None) == limit


def test_max_model_len_is_refused_when_there_are_fewer_positions() -> None:
    config = SimpleNamespace(model_type="whisper", max_target_positions=448)
    with pytest.raises(ModelUnsupported, match="--max-model-len is 500; allowed: at most 448"):
        choose_max_model_len(config, 500)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "delay_s", "is_shown"),
    [(_Terminal(), 0.0, True), (_Terminal(), 1e9, False), (io.StringIO(), 0.0, False)],
    ids=["slow", "quick", "no terminal"],
)
def test_show_progress_shows_a_bar_when_a_terminal_waits_long(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, delay_s: float, is_shown: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    assert list(show_progress([3, 1, 2], "weights", delay_s=delay_s)) == [3, 1, 2]
    shown = stream.getvalue()
    assert [part in shown for part in ("weights: ", "/3 ")] == [is_shown] * 2
    # At the end it is gone.
    assert shown.endswith("\r") == is_shown


class _Context:
    """Gives back the values; remembers the options."""

    sees_later = False
    options: AttentionOptions

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        self.options = options
        return value

    attend_to_encoder = attend


def _attend(**kwargs: object) -> AttentionOptions:
    register_attention()
    module, context = nn.Identity(), _Context()
    bind([module], context)
    heads = torch.arange(24.0).view(1, 2, 3, 4)
    mask = kwargs.pop("attention_mask", None)
    attend = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION_NAME]
    output, weights = attend(module, heads, heads, heads, mask, **kwargs)
    assert weights is None
    assert torch.equal(output, heads.transpose(1, 2))
    return context.options


def test_attention_passes_options_on_when_the_model_gives_them() -> None:
    sinks = torch.ones(2)
    options = _attend(
        scaling=0.5, sliding_window=7, softcap=30.0, s_aux=sinks, dropout=0.0, position_ids=sinks
    )
    assert (options.scale, options.sliding_window, options.softcap) == (0.5, 7, 30.0)
    assert options.sinks is sinks


def test_attention_scales_by_head_size_when_the_model_does_not_say() -> None:
    assert _attend().scale == 0.5


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"attention_mask": torch.ones(1)}, "its own attention mask"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.ones(1)}, "'position_bias'"),
        ({"indices": torch.ones(1)}, "'indices'"),
    ],
)
def test_attention_refuses_when_an_argument_would_change_the_result(
    kwargs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        _attend(**kwargs)


def test_unbind_forgets_the_context_when_it_is_there() -> None:
    module = nn.Identity()
    before = set(vars(module))
    bind([module], _Context())
    unbind([module, nn.Identity()])
    assert set(vars(module)) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_forward_pass_reads_nothing_on_the_host(architecture: str, tmp_path: Path) -> None:
    """A mask that says where rows begin would have to know; a recording refuses to."""
    loaded = load_tiny_model(architecture, tmp_path, max_model_len=48)
    cache = KVCache(loaded.layers, 16, 4, 0, loaded.dtype, loaded.device)
    step = make_step([Row([5, 6, 7], 0, [0], 3), Row([8, 9], 2, [1], 4), Row([7], 9, [2], 1)])
    batch = build_input_batch(step, [0, 1, 2], 16, loaded.device)
    model = TransformersModel(loaded, cache, _Queries())
    recorder = RecordedOps()
    with torch.inference_mode():
        recorder.record(lambda: _assert_rows(model.logits(batch)))
    assert recorder.num_recorded == 1


def _assert_rows(logits: Tensor) -> None:
    assert logits.shape[0] == 3


class _Queries:
    """A backend that attends to nothing: how long rows are it need not know."""

    def write_kv(self, *_arguments: object) -> None:
        pass

    def paged_attention(self, query: Tensor, *_arguments: object) -> Tensor:
        return query


BLOCK_SIZE = 8
TABLES = [[5, 2, 9], [3, 7, 0]]
LENGTHS = (20, 17)


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [("llama", "torch"), ("gpt_neox", "native"), ("llama", "native"), ("qwen3", "native")],
)
def test_model_reveals_what_layers_are_given_when_tokens_come_in_parts(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    directory = make_tiny_model(architecture, tmp_path, seed=2)
    compute = choose_compute(lambda: load_model(ModelConfig(str(directory))), backend, BLOCK_SIZE)
    pools = CacheConfig(BLOCK_SIZE, 10, 0)
    runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    # Prompts and decodes, side by side and alone.
    parts = [((0, 7), (0, 16)), ((7, 8), (16, 17)), ((8, 20), (0, 0))]

    def sampled() -> list[int]:
        tokens = []
        for spans in parts:
            rows = [
                Row(text[start:end], start, table, len(text))
                for text, table, (start, end) in zip(texts, TABLES, spans, strict=True)
                if end > start
            ]
            tokens += runner.execute(make_step(rows)).sampled_token_ids.tolist()
        return tokens

    before = sampled()
    assert isinstance(runner.model, RevealingModel)
    revealed: dict[int, Tensor] = {}
    runner.model.reveal(
        LAYER_IDS,
        lambda states, slots: revealed.update(
            zip(slots.tolist(), states.clone().unbind(1), strict=True)
        ),
    )
    assert sampled() == before
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for text, table in zip(texts, TABLES, strict=True):
        expected, embedded = _states_of_any(model, torch.tensor([text]))
        positions = range(len(text))
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        of_text = torch.stack([revealed[slot].flatten() for slot in slots])
        torch.testing.assert_close(of_text, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(runner.model.embed(torch.tensor(text)), embedded[0])


def _states_of_any(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    if not hasattr(model, "gpt_neox"):
        return states_of(model, tokens)
    # The same names for the parts that are looked at.
    model.model = model.gpt_neox
    return states_of(model, tokens)


def test_layer_states_refuse_what_is_no_stack_of_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ModelUnsupported, match="Sequential: the layers do not form one stack"):
        LayerStates(model, [model[0]], [0])
