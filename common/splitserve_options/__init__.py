"""Options of all processes, from flags, environment and a file, declared in one table."""

from splitserve_options.gateway_table import GATEWAY_OPTIONS
from splitserve_options.model_folder import (
    WEIGHT_FILES,
    NoCheckpoint,
    check_folder,
    check_special_kind,
    find_checkpoint,
    gguf_files,
)
from splitserve_options.option import (
    BUNDLED_MODEL,
    CACHE_ENV,
    CLIENT_ENV,
    COMMANDS,
    DEFAULT_CLUSTER_ADDRESS,
    ENV_PREFIX,
    Command,
    Option,
    OptionKind,
)
from splitserve_options.options import (
    OPTIONS,
    OptionError,
    Value,
    options_of,
    resolve,
    unknown_variables,
)
from splitserve_options.security_table import SECURITY_OPTIONS

__all__ = [
    "BUNDLED_MODEL",
    "CACHE_ENV",
    "CLIENT_ENV",
    "COMMANDS",
    "DEFAULT_CLUSTER_ADDRESS",
    "ENV_PREFIX",
    "GATEWAY_OPTIONS",
    "OPTIONS",
    "SECURITY_OPTIONS",
    "WEIGHT_FILES",
    "Command",
    "NoCheckpoint",
    "Option",
    "OptionError",
    "OptionKind",
    "Value",
    "check_folder",
    "check_special_kind",
    "find_checkpoint",
    "gguf_files",
    "options_of",
    "resolve",
    "unknown_variables",
]
