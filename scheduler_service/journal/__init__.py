"""Record and replay of scheduler cores; journal.proto has the format, ADR 5 the reasons."""
