from __future__ import annotations

import gc
import importlib

import pytest

from splitserve_common import imports_without_collections


def test_imports_without_collections_collects_again_when_an_import_fails() -> None:
    with pytest.raises(ImportError), imports_without_collections():
        assert not gc.isenabled()
        importlib.import_module("there_is_no_such_module")
    assert gc.isenabled()
    gc.unfreeze()
