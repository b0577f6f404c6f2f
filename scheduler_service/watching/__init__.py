"""Watchers of the scheduler: metrics, logs, traces, request lives and the live view, for operators.

Each watcher is a fold over the turns of the scheduler.
"""
