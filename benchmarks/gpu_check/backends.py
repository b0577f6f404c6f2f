"""The attention backends that can run here."""

from __future__ import annotations

from executor_service.backends.attention_candidates import Candidate, gpu_candidates


def present_backends() -> list[Candidate]:
    """Those that can run here."""
    return [candidate for candidate in gpu_candidates() if candidate.why_absent() is None]


def why_absent() -> dict[str, str]:
    """The backends that cannot run here, and why."""
    reasons = {candidate.name: candidate.why_absent() for candidate in gpu_candidates()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
