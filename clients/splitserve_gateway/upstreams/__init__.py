"""Upstream schedulers: discovery, model and readiness of each, and requests that outlive one."""
