"""Traces of requests, for OpenTelemetry collectors (ADR 24)."""
