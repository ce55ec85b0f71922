"""Small tensors on their way to the device, which nobody waits for."""

from __future__ import annotations

import torch


def upload(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.tensor(values)` on `device`; what follows on the stream finds it there."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same of a tensor in host memory, which is not copied if it is to stay there."""
    if device.type == "cuda":
        # From pinned memory, or the copy would wait for everything queued before it.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
