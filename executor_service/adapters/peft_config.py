"""The adapter_config.json of a PEFT adapter: which modules it changes, and how.

Names of fields and their meaning: `LoraConfig` of https://github.com/huggingface/peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import regex  # type: ignore[import-untyped]

from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid

# Fields that are read below.
_READ = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias",
    "lora_bias", "use_dora", "modules_to_save", "init_lora_weights", "ensure_weight_tying",
    "target_parameters",
})  # fmt: skip
# Fields that do not change what a trained adapter computes.
_HARMLESS = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config",
})  # fmt: skip
# Initialisations that change the base model's own weights, too.
_CHANGES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga")
# Limit of one match: an expression can take longer than the age of the universe.
_MATCH_TIMEOUT_S = 0.2
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Settings of an adapter, checked. Names of modules: as in the adapter's tensors."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any], max_rank: int) -> Self:
        """Checks `fields`. Raises AdapterInvalid for what is not served."""
        _check_served(fields)
        config = cls(fields)
        _check_number("lora_alpha", config.get("lora_alpha", 8))
        _check_rank("r", config.get("r", 8), max_rank)
        for name, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_number)):
            pattern = config.get(name, {})
            if not isinstance(pattern, dict):
                raise _invalid(name, pattern, "an object")
            for key, number in pattern.items():
                _check_expression(name, key)
                limits = (max_rank,) if check is _check_rank else ()
                check(f"{name}[{key!r}]", number, *limits)
        _check_modules(config)
        return config

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Returns the value of a field; `default` if it is absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def rank_of(self, module: str) -> int:
        """Returns the rank that a module has."""
        return int(_of_pattern(self, "rank_pattern", module, self.get("r", 8)))

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's low-rank product."""
        alpha = float(_of_pattern(self, "alpha_pattern", module, self.get("lora_alpha", 8)))
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.get("use_rslora", False) else rank)

    def saves(self, module: str) -> bool:
        """Returns whether an adapter has weights of its own for a module (modules_to_save)."""
        return _ends_with(module, self.get("modules_to_save", []))

    def changes(self, module: str, *, is_linear: bool) -> bool:
        """Returns whether an adapter has low-rank matrices for a module.

        `is_linear`: whether it is a linear layer other than the output head.
        """
        excluded = self.get("exclude_modules", [])
        if isinstance(excluded, str):
            if _matches("exclude_modules", f"(?:{excluded})$", module):
                return False
        elif _ends_with(module, excluded):
            return False
        saved: list[str] = self.get("modules_to_save", [])
        if any(_matches("modules_to_save", rf"(^|.*\.){each}($|\..*)", module) for each in saved):
            return False
        wanted = self.get("target_modules", [])
        if isinstance(wanted, str):
            if wanted.lower() == "all-linear":
                return is_linear
            return _matches("target_modules", f"(?:{wanted})$", module) is not None
        return module in wanted or (_ends_with(module, wanted) and self._has_layer(module))

    def changes_parameter(self, name: str) -> bool:
        """Returns whether an adapter has low-rank matrices for a parameter of a module."""
        return _ends_with(name, self.get("target_parameters", []))

    def _has_layer(self, module: str) -> bool:
        layers = self.get("layers_to_transform", [])
        if layers == []:
            return True
        patterns = self.get("layers_pattern", [])
        patterns = [patterns] if isinstance(patterns, str) else patterns
        found: Any = None
        if not patterns or patterns == [""]:
            found = _FIRST_INDEX.match(module)
        for pattern in patterns:
            expression = rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\."
            found = found or _matches("layers_pattern", expression, module)
        if found is None:
            return False
        return int(found["index"]) in ([layers] if isinstance(layers, int) else layers)


def _check_served(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise _invalid("peft_type", fields.get("peft_type"), "LORA")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise _invalid("task_type", fields["task_type"], "CAUSAL_LM, null")
    if fields.get("bias") not in (None, "none", "all", "lora_only"):
        raise _invalid("bias", fields["bias"], "none, all, lora_only")
    for name in ("use_rslora", "lora_bias", "use_dora", "ensure_weight_tying"):
        if fields.get(name) not in (None, False, True):
            raise _invalid(name, fields[name], "true, false")
    if fields.get("use_dora") and fields.get("lora_bias"):
        raise _invalid("lora_bias", True, "false where use_dora is true")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.match(start.lower()):
        raise _invalid(
            "init_lora_weights",
            start,
            "an initialisation that leaves the base model as it is (an adapter saved with"
            " path_initial_model_for_weight_conversion has it)",
        )
    _check_rest(fields)


def _check_rest(fields: Mapping[str, Any]) -> None:
    """Raises AdapterInvalid for fields that change the computation in ways that are not served."""
    for name, value in fields.items():
        if name not in _READ | _HARMLESS and value not in (None, False, "", [], {}):
            raise _invalid(name, value, "null or none of this field")


def _check_rank(name: str, rank: object, max_rank: int) -> None:
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise _invalid(name, rank, f"an integer from 1 to {max_rank}")


def _check_number(name: str, number: object) -> None:
    if type(number) not in (int, float) or not math.isfinite(float(str(number))):
        raise _invalid(name, number, "a number")


def _check_modules(config: PeftConfig) -> None:
    parameters = config.get("target_parameters", [])
    if not _are_names(parameters):
        raise _invalid("target_parameters", parameters, "names of parameters")
    wanted = config.get("target_modules", [] if parameters else None)
    if not isinstance(wanted, str) and not _are_names(wanted):
        raise _invalid("target_modules", wanted, "names of modules, or one regular expression")
    excluded = config.get("exclude_modules", [])
    if not isinstance(excluded, str) and not _are_names(excluded):
        raise _invalid("exclude_modules", excluded, "names of modules, or one regular expression")
    saved = config.get("modules_to_save", [])
    if not _are_names(saved):
        raise _invalid("modules_to_save", saved, "names of modules")
    layers = config.get("layers_to_transform", [])
    is_list = isinstance(layers, list) and all(type(each) is int for each in layers)
    if not is_list and type(layers) is not int:
        raise _invalid("layers_to_transform", layers, "one index, or a list of them")
    patterns = config.get("layers_pattern", [])
    if not isinstance(patterns, str) and not _are_names(patterns):
        raise _invalid("layers_pattern", patterns, "one name of a list of layers, or several")
    expressions = [wanted] if isinstance(wanted, str) else []
    expressions += [excluded] if isinstance(excluded, str) else []
    expressions += [patterns] if isinstance(patterns, str) else patterns
    for expression in (*expressions, *saved):
        _check_expression("target_modules, exclude_modules or another field", expression)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_expression(name: str, expression: str) -> None:
    try:
        regex.compile(expression)
    except regex.error as error:
        raise _invalid(name, expression, f"a regular expression ({error})") from error


def _of_pattern(config: PeftConfig, name: str, module: str, default: Any) -> Any:  # noqa: ANN401
    for key, value in config.get(name, {}).items():
        if _matches(name, rf"(.*\.)?({key})$", module):
            return value
    return default


def _matches(field: str, expression: str, module: str) -> Any:  # noqa: ANN401
    """Matches the start of a name, and returns what `re` does. Raises AdapterInvalid."""
    try:
        return regex.match(expression, module, timeout=_MATCH_TIMEOUT_S)
    except TimeoutError as error:
        raise _invalid(field, expression, "an expression that matches sooner") from error


def _ends_with(module: str, names: list[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def lacking(name: str, field: str) -> AdapterInvalid:
    """Returns the error for a layer that the configuration names and that has no tensors."""
    return AdapterInvalid(
        f"{WEIGHTS_NAME} lacks the tensors of {name}, which {field} of {CONFIG_NAME} names"
    )


def _invalid(field: str, value: object, allowed: str) -> AdapterInvalid:
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]} ..."
    return AdapterInvalid(f"{CONFIG_NAME}: {field} is {shown}; allowed: {allowed}")
