"""Where flash-attn 3 is from, what is said if it is not there, and which operators are taken."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from splitserve_kernels.gpu.attention import flash_attention_3_op
from splitserve_kernels.gpu.attention.flash_attention_3_op import (
    HUB,
    INSTALLED,
    FlashAttention3Missing,
    FlashAttention3Op,
    FlashAttention3Unusable,
    load_flash_attention_3,
    why_no_flash_attention_3_device,
)
from tests.support.fakes import fake_flash_attn_3

MODULES = ("flash_attn_3", "flash_attn_3._C", "flash_attn_interface")


@pytest.fixture
def namespace() -> Any:  # noqa: ANN401
    return fake_flash_attn_3.namespace("repository")


def test_installed_names_the_modules_when_flash_attention_3_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FlashAttention3Missing, match=r"no module flash_attn_3._C or flash_attn_"):
        load_flash_attention_3(INSTALLED)


def test_installed_names_the_error_when_flash_attention_3_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> ModuleType:
        raise ImportError("flash_attn_3/_C.abi3.so: undefined symbol: x\nmore")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(FlashAttention3Missing) as raised:
        load_flash_attention_3(INSTALLED)
    expected = "flash-attn 3 cannot be imported: flash_attn_3/_C.abi3.so: undefined symbol: x"
    assert str(raised.value) == expected


def test_installed_takes_either_module_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attn_3.register("flash_attn_3", *fake_flash_attn_3.BUILDS["repository"])
    monkeypatch.setitem(sys.modules, "flash_attn_3", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    assert isinstance(load_flash_attention_3(INSTALLED), FlashAttention3Op)


def test_hub_takes_the_operators_of_the_build_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, namespace: object
) -> None:
    asked = []

    def get_kernel(repository: str, *, version: int) -> ModuleType:
        asked.append((repository, version))
        return ModuleType("flash_attn3_build")

    operators = ModuleType("flash_attn3_build._ops")
    operators.ops = namespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    monkeypatch.setitem(sys.modules, "flash_attn3_build", ModuleType("flash_attn3_build"))
    monkeypatch.setitem(sys.modules, "flash_attn3_build._ops", operators)
    assert isinstance(load_flash_attention_3(HUB), FlashAttention3Op)
    assert asked == [("kernels-community/flash-attn3", 1)]


def _unreachable(_repository: str, **_options: int) -> ModuleType:
    raise OSError("no route to the host\nTraceback")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (
            SimpleNamespace(get_kernel=_unreachable),
            r"flash-attn3 cannot be fetched from the hub: no route to the host$",
        ),
        (None, "from the hub requires the package kernels"),
    ],
    ids=["unreachable", "no package"],
)
def test_hub_says_one_line_when_it_has_no_build(
    kernels: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    with pytest.raises(FlashAttention3Missing, match=said):
        load_flash_attention_3(HUB)


def test_file_gives_the_operators_of_its_name_or_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    fake_flash_attn_3.register("imitated_by_file", *fake_flash_attn_3.BUILDS["vllm"])
    folder = tmp_path / "imitated_by_file"
    folder.mkdir()
    for path in (tmp_path / "imitated_by_file.abi3.so", folder / "_C.abi3.so"):
        path.touch()
        assert isinstance(load_flash_attention_3(str(path)), FlashAttention3Op)
    assert len(loaded) == 2


def test_file_gives_its_operators_when_it_was_renamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(_path: Path) -> None:
        fake_flash_attn_3.register("of_a_renamed_file", *fake_flash_attn_3.BUILDS["vllm"])

    path = tmp_path / "fa3.so"
    path.touch()
    # Another test of this process may have registered that of installed packages.
    monkeypatch.setattr(flash_attention_3_op, "_NAMESPACE", "of_no_package")
    monkeypatch.setattr(torch.ops, "load_library", load)
    assert isinstance(load_flash_attention_3(str(path)), FlashAttention3Op)
    # A second load registers nothing.
    monkeypatch.setattr(torch.ops, "load_library", lambda _path: None)
    assert isinstance(load_flash_attention_3(str(path)), FlashAttention3Op)


def test_file_is_refused_by_name_when_it_is_another_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[Any] = []

    def load(_path: Path) -> None:
        untyped: Any = torch.library.Library
        kept.append(untyped("of_another_library", "FRAGMENT"))
        kept[0].define("varlen(Tensor q) -> Tensor")

    path = tmp_path / "other.so"
    path.touch()
    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(FlashAttention3Missing, match=r"no operator fwd: .* of_another_library"):
        load_flash_attention_3(str(path))


def test_file_is_named_when_it_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(FlashAttention3Missing, match=r"no such file: .*/_C.so"):
        load_flash_attention_3(str(tmp_path / "_C.so"))
    (tmp_path / "_C.so").write_text("no library")
    with pytest.raises(FlashAttention3Missing, match=r"_C.so cannot be loaded: "):
        load_flash_attention_3(str(tmp_path / "_C.so"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("fwd(Tensor q) -> Tensor", r"fwd has no argument cu_seqlens_q"),
        (
            fake_flash_attn_3.VLLM_FORWARD.replace("int cp_rank", "int page_group"),
            "fwd requires an unknown argument page_group",
        ),
        ("bwd(Tensor q) -> Tensor", r"operator \w+.fwd is missing"),
    ],
)
def test_op_names_what_it_cannot_call_when_a_build_is_another(schema: str, reason: str) -> None:
    name = f"odd_flash_attn_3_{abs(hash(reason))}"
    untyped: Any = torch.library.Library
    library = untyped(name, "FRAGMENT")
    library.define(schema)
    with pytest.raises(FlashAttention3Unusable, match=reason):
        FlashAttention3Op(getattr(torch.ops, name))


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "there is no CUDA device"),
        ((7, 5), "flash-attn 3 requires compute capability 8.0 to 9.0"),
        ((10, 0), "flash-attn 3 requires compute capability 8.0 to 9.0"),
        ((8, 0), None),
        ((9, 0), None),
    ],
)
def test_rules_name_the_device_when_it_cannot_run_flash_attention_3(
    capability: tuple[int, int] | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert why_no_flash_attention_3_device() == reason
