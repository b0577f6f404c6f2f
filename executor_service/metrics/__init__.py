"""Prometheus metrics of steps and streams."""
