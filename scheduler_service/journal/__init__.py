"""Record and replay of the scheduler; journal.proto has the format, ADR 5 the reasons."""
