"""Kernels run on the GPU if there is one, otherwise on the CPU in Triton's interpreter."""

from tests.support.devices.triton_device import device, repaired_interpreter

__all__ = ["device", "repaired_interpreter"]
