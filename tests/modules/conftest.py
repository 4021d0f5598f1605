"""Fixtures of tests whose tensors are on an accelerator where there is one."""

from support.devices.on_device import on_device, tiny_target, tiny_target_f64

__all__ = ["on_device", "tiny_target", "tiny_target_f64"]
