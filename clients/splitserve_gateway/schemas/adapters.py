"""Request bodies that load and unload adapters, with the names of vLLM."""

from __future__ import annotations

from splitserve_gateway.schemas.base import ApiRequest, Flag, Ignored, Name


class LoadAdapterRequest(ApiRequest):
    """Request body of `/v1/load_lora_adapter`.

    `lora_path`: folder or file on the scheduler's machine. `load_inplace`: replace an adapter of
    this name from another folder.
    """

    lora_name: Name
    lora_path: Name
    load_inplace: Flag = False


class UnloadAdapterRequest(ApiRequest):
    """Request body of `/v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: Ignored = None
