"""Scheduler service: owns requests, queues and block tables, and decides each step of executors.

The service computes no tensors.
"""
