"""Whether a clock elsewhere agrees with ours."""

from __future__ import annotations

from splitserve_cli.checks.finding import Finding, ok, warning, wrong

_MUCH_S = 60.0
_LITTLE_S = 1.0


def check_clock(
    name: str, theirs_s: float, asked_s: float, answered_s: float, resolution_s: float = 0.0
) -> Finding:
    """`theirs_s` was read between both times of ours; it may be `resolution_s` later than that."""
    early_s = theirs_s - answered_s
    late_s = theirs_s + resolution_s - asked_s
    if early_s <= 0 <= late_s:
        return ok(name, f"agrees with ours, within {late_s - early_s:.3f} s")
    apart_s = early_s if early_s > 0 else late_s
    found = f"{abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} ours at least"
    remedy = "chrony or another NTP on both machines"
    if abs(apart_s) >= _MUCH_S:
        meaning = "certificates and tokens may be refused as ended, or as not yet begun"
        return wrong(name, found, meaning, remedy)
    if abs(apart_s) >= _LITTLE_S:
        return warning(name, found, "logs and traces of both cannot be compared", remedy)
    return ok(name, found)
