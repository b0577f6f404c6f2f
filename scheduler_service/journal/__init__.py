"""Journal of the scheduler: recording and replay. Format: journal.proto; reasons: ADR 5."""
