"""What can be wrong with what was asked for, as a line for whoever asked."""

from __future__ import annotations

from splitserve_bench.load.local_load import TargetUnusable
from splitserve_bench.load.process_load import LoadProcessFailed
from splitserve_bench.workloads.traces import TraceUnreadable
from splitserve_client.errors import SplitserveError
from splitserve_rpc.security import SecurityUnusable
from splitserve_rpc.watched_files import FilesUnusable

# TargetRefused is a ValueError, as is what flags refuse.
PROBLEMS = (
    TargetUnusable, LoadProcessFailed, TraceUnreadable, SplitserveError, SecurityUnusable,
    FilesUnusable, OSError, ValueError,
)  # fmt: skip


def problem_text(errors: BaseExceptionGroup[BaseException]) -> str:
    """The first of them in a line."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, SplitserveError) else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())
