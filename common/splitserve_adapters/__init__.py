"""Files of LoRA adapters, for schedulers, executors and the command line."""

from splitserve_adapters.adapter_files import (
    CONFIG_NAME,
    MAX_ADAPTER_NAME,
    WEIGHTS_NAME,
    AdapterFiles,
    AdapterInvalid,
    check_adapter_name,
    digest_of,
    is_adapter_folder,
    name_of,
    parse_adapters,
    read_adapters_file,
    read_config,
    reference_of,
)

__all__ = [
    "CONFIG_NAME",
    "MAX_ADAPTER_NAME",
    "WEIGHTS_NAME",
    "AdapterFiles",
    "AdapterInvalid",
    "check_adapter_name",
    "digest_of",
    "is_adapter_folder",
    "name_of",
    "parse_adapters",
    "read_adapters_file",
    "read_config",
    "reference_of",
]
