"""Workloads: requests and their times, drawn from a seed or recorded."""
