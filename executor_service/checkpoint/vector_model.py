"""Models that return vectors: which checkpoints are such, and what is made of their weights.

Encoders, and decoders whose vectors need the hidden states of all tokens, are uncached. Other
decoders go through paged attention as generating models do, with an output head that passes on
hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor_service.checkpoint.folder import Checkpoint
from executor_service.checkpoint.model_kind import causal_classes, is_bidirectional, media_parts
from executor_service.checkpoint.vector_files import (
    SentenceFiles,
    read_activation,
    read_labels,
    read_max_length,
    read_sentence_files,
)
from executor_service.errors import ModelUnsupported, TrialFailed, one_line
from executor_service.model import (
    EmbeddingHead,
    PoolingMode,
    RowVectors,
    ScoreHead,
    TextModel,
    VectorHead,
    vector_decoder,
)
from executor_service.steps import ModelVectors, PoolingParams, PoolingTask
from executor_service.trials import try_rows

_log = logging.getLogger(__name__)

_CLASSIFIER = "ForSequenceClassification"
# Endings of encoders whose vectors are the mean of their hidden states, if no file says otherwise.
_ENCODER_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining")
_PRICE_OF_GROUPS = "rows of different lengths are computed one group after the other"


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """Vectors of a checkpoint. `model_class`: of `transformers`; None for that which generates.

    `files`: what sentence-transformers' files say, or what is assumed in their absence.
    `is_causal`: tokens attend to no later ones.
    """

    model_class: type | None
    files: SentenceFiles
    is_causal: bool

    @property
    def is_classifier(self) -> bool:
        """Whether the vectors are scores."""
        return self.files.is_classifier

    @property
    def is_uncached(self) -> bool:
        """Whether the vectors need the hidden states of all tokens."""
        is_last = self.is_classifier or self.files.modes == (PoolingMode.LAST_TOKEN,)
        return not (self.is_causal and is_last)


def plan_vectors(checkpoint: Checkpoint, config: Any, task: str) -> VectorPlan | None:  # noqa: ANN401
    """Returns what vectors a checkpoint returns; None if it returns tokens.

    `config`: of `transformers`. `task`: a value of --task. Raises ModelUnsupported, and
    ModelUnreadable for files that are broken.
    """
    if task == "generate":
        return None
    files = None if checkpoint.gguf is not None else read_sentence_files(checkpoint.directory)
    architectures = checkpoint.architectures
    is_classifier = any(name.endswith(_CLASSIFIER) for name in architectures)
    if task == "classify" and not is_classifier:
        raise ModelUnsupported(
            f"{config.model_type}: --task classify: config.json names no {_CLASSIFIER}: not served;"
            f" supported: architectures that end in {_CLASSIFIER}"
        )
    if task == "auto" and files is not None:
        is_classifier = files.is_classifier
    if task != "embed" and is_classifier:
        return _plan_classifier(config, files)
    if task == "embed" or files is not None or _is_plain_encoder(config, architectures):
        return _plan_embeddings(checkpoint, config, files)
    return None


def _plan_classifier(config: Any, files: SentenceFiles | None) -> VectorPlan:  # noqa: ANN401
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if config.is_encoder_decoder:
        raise _not_served(config, "classifier with an encoder and a decoder")
    model_class = _class_in(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, config)
    length = None if files is None else files.max_length
    return VectorPlan(
        model_class, SentenceFiles(is_classifier=True, max_length=length), _is_causal(config)
    )


def _plan_embeddings(
    checkpoint: Checkpoint,
    config: Any,  # noqa: ANN401
    files: SentenceFiles | None,
) -> VectorPlan:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_TEXT_ENCODING_MAPPING,
        MODEL_MAPPING,
    )

    if files is not None and files.is_classifier:
        raise _not_served(config, "sentence-transformers' files name a classifier")
    is_causal = _is_causal(config)
    if files is None:
        files = _assumed(checkpoint, is_causal=is_causal)
    is_quantised = checkpoint.gguf is not None or checkpoint.quantization is not None
    if is_causal and is_quantised:
        return VectorPlan(None, files, is_causal)
    has_decoder = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    mapping: Any = MODEL_FOR_TEXT_ENCODING_MAPPING if has_decoder else MODEL_MAPPING
    return VectorPlan(_class_in(mapping, config), files, is_causal)


def _assumed(checkpoint: Checkpoint, *, is_causal: bool) -> SentenceFiles:
    mode = PoolingMode.LAST_TOKEN if is_causal else PoolingMode.MEAN
    _log.warning(
        "pooling_assumed model=%s pooling=%s normalised=%s: the checkpoint has no modules.json",
        checkpoint.name,
        mode.value,
        is_causal,
    )
    length = None if checkpoint.gguf is not None else read_max_length(checkpoint.directory)
    return SentenceFiles(False, (mode,), (), is_causal, length)


def _class_in(mapping: Any, config: Any) -> type:  # noqa: ANN401
    found: Any = mapping.get(type(config), None)
    if found is None or media_parts(config):
        raise _not_served(config, "no model of texts of this kind in transformers")
    first: type = found[0] if isinstance(found, tuple) else found
    return first


def _is_causal(config: Any) -> bool:  # noqa: ANN401
    return bool(causal_classes(config)) and not is_bidirectional(config)


def _is_plain_encoder(config: Any, architectures: Sequence[str]) -> bool:  # noqa: ANN401
    """Returns whether a checkpoint is an encoder of texts without a head for some other task."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder or media_parts(config):
        return False
    if architectures and not architectures[0].endswith(_ENCODER_ENDINGS):
        return False
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal_classes(config)
    return is_encoder or is_bidirectional(config)


def _not_served(config: Any, reason: str) -> ModelUnsupported:  # noqa: ANN401
    return ModelUnsupported(
        f"{config.model_type}: {reason}: not served; supported: encoders such as BertModel,"
        f" decoders such as Qwen3Model with --task embed, and their {_CLASSIFIER}"
    )


def limited_length(plan: VectorPlan, limit: int) -> int:
    """Returns the tokens of a text at most: `limit` of the positions, or less by the files."""
    length = plan.files.max_length
    return limit if length is None else min(limit, length)


# -- What is made of a model with its weights ------------------------------------------------------


def make_head(plan: VectorPlan, checkpoint: Checkpoint, whole: Any) -> VectorHead:  # noqa: ANN401
    """Returns the last steps of the vectors of `whole`, of `transformers`, on its device."""
    head: VectorHead
    if plan.is_classifier:
        num_labels = int(whole.config.num_labels)
        activation = read_activation(checkpoint.directory, whole.config, num_labels)
        head = ScoreHead(activation, None if plan.is_uncached else _score_of(whole))
    else:
        head = EmbeddingHead(nn.Sequential(*plan.files.steps).eval(), plan.files.is_normalised)
    return head.to(torch.device(whole.device))


def _score_of(whole: Any) -> nn.Linear:  # noqa: ANN401
    """Returns the layer that makes a decoder's logits of labels, in float32."""
    score = getattr(whole, "score", None)
    if not isinstance(score, nn.Linear):
        raise _not_served(whole.config, f"{type(whole).__name__} has no linear layer score")
    copy = nn.Linear(score.in_features, score.out_features, score.bias is not None, device="meta")
    for name, parameter in score.named_parameters():
        setattr(copy, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
    return copy


def describe_vectors(plan: VectorPlan, whole: Any, head: VectorHead) -> ModelVectors:  # noqa: ANN401
    """Returns what the vectors of `whole` are. Raises ModelUnsupported if `head` does not fit."""
    if plan.is_classifier:
        return ModelVectors(0, read_labels(whole.config), plan.is_uncached)
    pooled = torch.zeros(1, len(plan.files.modes) * width_of(whole), device=whole.device)
    try:
        with torch.inference_mode():
            vector = head.finish(pooled, [PoolingParams(PoolingTask.EMBEDDING)])[0]
    except RuntimeError as error:
        reason = f"the modules of sentence-transformers do not fit together ({one_line(error)})"
        raise _not_served(whole.config, reason) from error
    return ModelVectors(len(vector), (), plan.is_uncached)


def width_of(whole: Any) -> int:  # noqa: ANN401
    """Returns the numbers of a hidden state."""
    return int(whole.config.get_text_config(decoder=True).hidden_size)


def make_decoder(whole: Any) -> Any:  # noqa: ANN401
    """Returns a decoder, whatever its head, as a causal language model of hidden states."""
    base = whole.base_model
    return vector_decoder(base, next(iter(causal_classes(base.config).values()), None))


def make_uncached(
    plan: VectorPlan,
    whole: Any,  # noqa: ANN401
    head: VectorHead,
    max_model_len: int,
) -> tuple[RowVectors, str]:
    """Returns the uncached model of `whole`, and a description of how it computes, for people."""
    model = TextModel(
        whole, plan.files.modes, is_causal=plan.is_causal, max_model_len=max_model_len
    )
    try:
        try_rows(model)
        description = "rows side by side"
    except TrialFailed as error:
        _log.warning(
            "rows_grouped_by_length model=%s reason=%r price=%r",
            type(whole).__name__,
            str(error),
            _PRICE_OF_GROUPS,
        )
        model.switch(is_flat=False)
        description = "rows grouped by length"
    return RowVectors(model, head), description
