"""Reports for people and programs: table, JSON, picture, comparison."""

from splitserve_bench.reports.report import (
    ReportUnreadable,
    TargetReport,
    comparison_text,
    read_report,
    report_of,
    text_of,
    write_report,
)
from splitserve_bench.reports.svg_picture import picture, write_picture

__all__ = [
    "ReportUnreadable",
    "TargetReport",
    "comparison_text",
    "picture",
    "read_report",
    "report_of",
    "text_of",
    "write_picture",
    "write_report",
]
