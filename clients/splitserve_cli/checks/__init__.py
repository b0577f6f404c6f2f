"""Checks of a machine, of settings and of processes: one function per question."""

from splitserve_cli.checks.cluster import check_clock, check_executors, check_model
from splitserve_cli.checks.connection import TlsWords, check_connection
from splitserve_cli.checks.finding import (
    Finding,
    State,
    check_settings,
    listened_at,
    write_findings,
    wrong,
)
from splitserve_cli.checks.gateway import GatewayAddress, check_gateway
from splitserve_cli.checks.machine import (
    check_compilers,
    check_file_limit,
    check_instructions,
    check_memory,
    check_pools,
    check_shared_memory,
    check_swap,
    check_threads,
    compiler_problems,
    has_gpu,
    num_cores,
)
from splitserve_cli.checks.packages import (
    check_packages,
    check_python,
    check_torch,
    command_installed,
    installed_version,
    why_not_imported,
)
from splitserve_cli.checks.ports import (
    check_port,
    check_process_files,
    check_tls_files,
    check_twice,
    owner_of,
)

__all__ = [
    "Finding",
    "GatewayAddress",
    "State",
    "TlsWords",
    "check_clock",
    "check_compilers",
    "check_connection",
    "check_executors",
    "check_file_limit",
    "check_gateway",
    "check_instructions",
    "check_memory",
    "check_model",
    "check_packages",
    "check_pools",
    "check_port",
    "check_process_files",
    "check_python",
    "check_settings",
    "check_shared_memory",
    "check_swap",
    "check_threads",
    "check_tls_files",
    "check_torch",
    "check_twice",
    "command_installed",
    "compiler_problems",
    "has_gpu",
    "installed_version",
    "listened_at",
    "num_cores",
    "owner_of",
    "why_not_imported",
    "write_findings",
    "wrong",
]
