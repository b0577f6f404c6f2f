"""LoRA adapters that requests may name: where their files are, and which version a name means."""

from scheduler_service.adapters.registry import AdapterRegistry, AdapterUnknown, RegisteredAdapter

__all__ = ["AdapterRegistry", "AdapterUnknown", "RegisteredAdapter"]
