"""The store of loaded adapters."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from executor_service.adapters import AdapterStore
from executor_service.model import Adapter, LoadedAdapters
from splitserve_contract import DomainError


def test_store_says_that_it_is_full_when_the_device_has_no_memory() -> None:
    def read(_name: str, _files: Mapping[str, bytes]) -> Adapter:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    store = AdapterStore(LoadedAdapters(), read, max_num_loaded=2)
    with pytest.raises(DomainError, match="CUDA out of memory") as raised:
        store.load("a@1", {})
    assert raised.value.reason == "ADAPTERS_FULL"
    assert not store.has("a@1")
