from __future__ import annotations

import gc
from contextlib import suppress

from splitserve_common import imports_without_collections


def test_imports_without_collections_collects_again_when_an_import_fails() -> None:
    with suppress(ImportError), imports_without_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
