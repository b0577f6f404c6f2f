"""Modules that use Triton: on the GPU if there is one, otherwise in its interpreter."""

from tests.support.devices.triton_device import device, repaired_interpreter

__all__ = ["device", "repaired_interpreter"]
