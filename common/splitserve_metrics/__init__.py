"""Prometheus metrics of all processes: tables of metrics, instruments, and the HTTP listener."""
