"""Files that say which vectors a checkpoint returns: those of sentence-transformers, config.json.

Files of old and of new versions of sentence-transformers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line
from executor_service.model import Activation, DenseStep, NormalizeStep, PoolingMode
from splitserve_common import parse_json

_log = logging.getLogger(__name__)

MODULES = "modules.json"
# Of the first module, by the kind of model in old versions of sentence-transformers.
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_CLASSIFIES = "sequence-classification"
_TASKS = ("feature-extraction", _CLASSIFIES)
# Switches of old versions, in the order in which pooled vectors are concatenated.
_OLD_MODES: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST_TOKEN,
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "Identity": Activation.IDENTITY,
    "Sigmoid": Activation.SIGMOID,
    "Softmax": Activation.SOFTMAX,
}
_VECTORS = "sentence_embedding"
# Tokenizers without a limit have a huge one.
_MAX_LENGTH = 10**9


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Contents of the files of sentence-transformers.

    `is_classifier`: the model is a cross-encoder; it has no pooling then. `modes`, `steps`: of the
    pooling, and after it; a last normalisation is `is_normalised` instead of a step. `max_length`:
    tokens; None for no limit.
    """

    is_classifier: bool
    modes: tuple[PoolingMode, ...] = ()
    steps: tuple[nn.Module, ...] = ()
    is_normalised: bool = False
    max_length: int | None = None


@dataclass(slots=True)
class _Modules:
    modes: tuple[PoolingMode, ...] = ()
    steps: list[nn.Module] = field(default_factory=list)


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """Reads modules.json and the files that it names; None if there is none.

    Raises ModelUnreadable, and ModelUnsupported for modules and settings that are not served.
    """
    path = directory / MODULES
    if not path.is_file():
        return None
    listed = _read_list(path)
    kinds = [_kind(path, module) for module in listed]
    if not kinds or kinds[0] != "Transformer":
        raise _not_served(path, f"its first module is {kinds[0] if kinds else 'missing'}")
    if listed[0].get("path"):
        raise _not_served(path, f"its Transformer is in {listed[0]['path']!r}, not beside it")
    is_classifier = _is_classifier(directory)
    if is_classifier and len(kinds) > 1:
        raise _not_served(path, f"it has a module {kinds[1]} behind a classifier")
    found = _Modules()
    for kind, module in zip(kinds[1:], listed[1:], strict=True):
        _add(found, kind, _folder(path, module))
    if not is_classifier and not found.modes:
        raise _not_served(path, "it has no module Pooling")
    is_normalised = bool(found.steps) and isinstance(found.steps[-1], NormalizeStep)
    steps = found.steps[:-1] if is_normalised else found.steps
    return SentenceFiles(
        is_classifier, found.modes, tuple(steps), is_normalised, read_max_length(directory)
    )


def read_max_length(directory: Path) -> int | None:
    """Returns the limit of tokens by sentence-transformers' files or the tokenizer's; None if none.

    New versions of sentence-transformers write it into tokenizer_config.json.
    """
    limits = [
        _read_optional(directory / name).get("max_seq_length") for name in _TRANSFORMER_CONFIGS
    ]
    limits.append(_read_optional(directory / "tokenizer_config.json").get("model_max_length"))
    return next(
        (int(each) for each in limits if isinstance(each, (int, float)) and 0 < each < _MAX_LENGTH),
        None,
    )


def _is_classifier(directory: Path) -> bool:
    settings = _transformer_settings(directory)
    task = settings.get("transformer_task", _TASKS[0])
    if task not in _TASKS:
        raise _not_served(directory / MODULES, f"its transformer_task is {task!r}")
    return bool(task == _CLASSIFIES)


def _transformer_settings(directory: Path) -> dict[str, Any]:
    contents = (_read_optional(directory / name) for name in _TRANSFORMER_CONFIGS)
    return next((content for content in contents if content), {})


def _kind(path: Path, module: Mapping[str, Any]) -> str:
    """Returns the class name of a module of modules.json."""
    kind = module.get("type")
    if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
        raise _not_served(path, f"it has a module {kind!r}, and custom code is never run")
    return kind.rpartition(".")[2]


def _folder(path: Path, module: Mapping[str, Any]) -> Path:
    name = module.get("path")
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelUnreadable(f"{path}: path is {name!r}, which is not the name of a folder")
    return path.parent / name


def _add(found: _Modules, kind: str, folder: Path) -> None:
    """Adds a module behind the Transformer to `found`."""
    if kind == "Pooling" and not found.modes:
        found.modes = _read_modes(folder / "config.json")
    elif kind == "Dense" and found.modes:
        found.steps.append(_read_dense(folder))
    elif kind == "Normalize" and found.modes:
        found.steps.append(NormalizeStep())
    elif kind != "Dropout":
        raise _not_served(folder.parent / MODULES, f"it has a module {kind} at this place")


def _read_modes(path: Path) -> tuple[PoolingMode, ...]:
    settings = _read(path)
    if settings.get("include_prompt", True) is not True:
        raise _not_served(path, "include_prompt is false")
    named = settings.get("pooling_mode")
    if named is None:
        switched_on = (mode for name, mode in _OLD_MODES.items() if settings.get(name))
        return tuple(switched_on) or (PoolingMode.MEAN,)
    names = [named] if isinstance(named, str) else named
    try:
        return tuple(PoolingMode(name) for name in names)
    except (TypeError, ValueError) as error:
        allowed = ", ".join(mode.value for mode in PoolingMode)
        raise _not_served(path, f"pooling_mode is {named!r}; allowed: {allowed}") from error


def _read_dense(folder: Path) -> DenseStep:
    path = folder / "config.json"
    settings = _read(path)
    for name in ("module_input_name", "module_output_name"):
        if settings.get(name) not in (None, _VECTORS):
            raise _not_served(path, f"{name} is {settings[name]!r}")
    weights = _read_weights(folder)
    try:
        linear = _linear(weights, "linear", has_bias=settings.get("bias", True))
        residual: nn.Module | None = None
        if settings.get("use_residual"):
            residual = (
                _linear(weights, "residual", has_bias=False)
                if ("residual.weight" in weights)
                else nn.Identity()
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnreadable(
            f"{folder}: no weights as config.json says: {one_line(error)}"
        ) from error
    return DenseStep(linear, _activation_module(path, settings), residual)


def _linear(weights: Mapping[str, Tensor], name: str, *, has_bias: bool) -> nn.Linear:
    weight = weights[f"{name}.weight"].float()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        linear.bias = nn.Parameter(weights[f"{name}.bias"].float(), requires_grad=False)
    return linear


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        if (folder / "model.safetensors").is_file():
            return load_file(folder / "model.safetensors")
        read: dict[str, Tensor] = torch.load(
            folder / "pytorch_model.bin", map_location="cpu", weights_only=True
        )
        return read
    except Exception as error:  # readers of files raise whatever they like
        raise ModelUnreadable(f"{folder}: weights not readable ({one_line(error)})") from error


def _activation_module(path: Path, settings: Mapping[str, Any]) -> nn.Module:
    """Returns the activation function of a Dense; Tanh unless it says otherwise."""
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    found: Any = getattr(nn, str(name).rpartition(".")[2], None)
    is_known = str(name).startswith("torch.nn.") and isinstance(found, type)
    if not is_known or not issubclass(found, nn.Module):
        raise _not_served(path, f"activation_function is {name!r}")
    try:
        made: nn.Module = found()
    except TypeError as error:
        raise _not_served(path, f"activation_function is {name!r}") from error
    return made


# -- Classifiers -----------------------------------------------------------------------------------


def read_activation(directory: Path, config: Any, num_labels: int) -> Activation:  # noqa: ANN401
    """Returns how a classifier's logits become scores.

    `config`: of `transformers`. sentence-transformers' files win, then come its fields in
    config.json, then `problem_type`. Raises ModelUnsupported for another function.
    """
    of_model = getattr(config, "sentence_transformers", None)
    named = (
        _read_optional(directory / "config_sentence_transformers.json").get("activation_fn"),
        of_model.get("activation_fn") if isinstance(of_model, dict) else None,
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    name = next((each for each in named if each is not None), None)
    if name is not None:
        return _named_activation(directory, name)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return Activation.IDENTITY
    if problem == "multi_label_classification" or num_labels == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX


def _named_activation(directory: Path, name: object) -> Activation:
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or kind not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise _not_served(
            directory, f"the activation_fn of its scores is {name!r}; allowed: {allowed}"
        )
    return _ACTIVATIONS[kind]


def read_labels(config: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Returns the names of a classifier's labels, in the order of its logits."""
    names: Mapping[int, Any] = getattr(config, "id2label", None) or {}
    return tuple(str(names.get(label, f"LABEL_{label}")) for label in range(config.num_labels))


# -- Files -----------------------------------------------------------------------------------------


def _not_served(path: Path, reason: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{path}: {reason}: not served; supported: the modules Transformer, Pooling, Dense and"
        " Normalize of sentence-transformers, in this order"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path}: not readable as JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{path}: not a JSON object")
    return content


def _read_optional(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file."""
    return _read(path) if path.is_file() else {}


def _read_list(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path}: not readable as JSON ({one_line(error)})") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise ModelUnreadable(f"{path}: not a list of JSON objects")
    return content
