"""Tiny random models that return vectors, and steps that ask for their vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from executor_service.steps import PoolingParams, PoolingTask, StepOutput
from tests.support.steps.step_driver import Row, make_step

if TYPE_CHECKING:
    from executor_service.engine_loader import LoadedEngine

VOCAB_SIZE = 160
NUM_POSITIONS = 130
WINDOW = 16
EMBEDDING = PoolingParams(PoolingTask.EMBEDDING)
SCORES = PoolingParams(PoolingTask.SCORES)

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": NUM_POSITIONS,
    "pad_token_id": 0,
}
_ONE_TYPE = {"type_vocab_size": 1, "pad_token_id": 1}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
# Options of configurations beside the sizes, by model type.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "albert": {"embedding_size": 32},
    "bert": {},
    "camembert": _ONE_TYPE,
    "deberta": _RELATIVE,
    "deberta-v2": {**_RELATIVE, "position_biased_input": False},
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    "electra": {"embedding_size": 32},
    "eurobert": {"num_key_value_heads": 2},
    "gemma2": {**_GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": NUM_POSITIONS},
    "gte": {},
    "jina_embeddings_v3": {},
    "llama": _GROUPED,
    "modernbert": {"local_attention": WINDOW, "global_attn_every_n_layers": 3},
    "mpnet": {"pad_token_id": 1},
    "nomic_bert": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": _GROUPED,
    "roberta": _ONE_TYPE,
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "xlm-roberta": _ONE_TYPE,
}


def make_vector_model(
    model_type: str,
    directory: Path,
    model_class: str = "AutoModel",
    seed: int = 0,
    **overrides: object,
) -> Any:  # noqa: ANN401
    """Saves a random model with a tokenizer in `directory`. Returns it, of `transformers`.

    `overrides`: options of its configuration. Attention is eager: every model has it.
    """
    import transformers

    untyped: Any = transformers
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    options = {**_SIZES, **_OPTIONS[model_type], "bos_token_id": 1, "eos_token_id": 2, **overrides}
    config = untyped.AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _made(getattr(untyped, model_class), config)
        # Far larger weights than usual, and no constant ones: every part matters.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.08)
    model.eval().save_pretrained(directory)
    save_tokenizer(directory, has_types=int(getattr(config, "type_vocab_size", 0) or 0) > 1)
    return model


def _made(model_class: Any, config: Any) -> Any:  # noqa: ANN401
    if model_class.__name__.startswith("Auto"):
        return model_class.from_config(config, attn_implementation="eager")
    config._attn_implementation = "eager"
    return model_class(config)


def save_tokenizer(directory: Path, *, has_types: bool) -> None:
    """Saves a tokenizer of words `t4`, `t5`, ..; texts begin with token 1 and end with token 2."""
    from transformers import PreTrainedTokenizerFast

    names = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"t{n}" for n in range(4, VOCAB_SIZE)))
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask", *["token_type_ids"] * has_types],
    )
    fast.save_pretrained(directory)


def random_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Ordinary tokens for rows of `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def run_rows(
    engine: LoadedEngine,
    rows: Sequence[Sequence[int]],
    params: PoolingParams | Sequence[PoolingParams] = EMBEDDING,
    *,
    num_computed: Sequence[int] | None = None,
    samples: bool = True,
) -> StepOutput:
    """The output of one step. Row `r` has blocks of its own.

    `num_computed`: tokens of each row that earlier steps computed; `rows` has the others.
    """
    of_rows = [params] * len(rows) if isinstance(params, PoolingParams) else params
    computed = [0] * len(rows) if num_computed is None else num_computed
    width = -(-NUM_POSITIONS // engine.info.block_size)
    step = make_step(
        [
            Row(
                tokens,
                num_computed=start,
                block_table=range(row * width, (row + 1) * width),
                num_prompt_tokens=start + len(tokens),
                samples=samples,
                pooling=of_rows[row],
            )
            for row, (tokens, start) in enumerate(zip(rows, computed, strict=True))
        ]
    )
    pending = engine.runner.begin(step)
    assert pending is not None
    return pending.finish()


def vectors_of(output: StepOutput) -> list[torch.Tensor]:
    """The vectors of all rows, each of which has one."""
    found: list[torch.Tensor] = []
    for vector in output.vectors:
        assert isinstance(vector, np.ndarray), output.row_errors
        found.append(torch.from_numpy(vector))
    return found
