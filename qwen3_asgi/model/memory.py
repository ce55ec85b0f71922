"""Where the model runs, on how many threads, and how much memory its KV pool may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.cuda.capacity import card_memory, pool_budget, step_bytes
from qwen3_asgi.model.kv import bytes_per_block

if TYPE_CHECKING:
    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.model.config import ModelConfig

GIB = 2**30
# The engine is a guest in somebody's web process, on a machine that others share.
CPU_POOL_FRACTION = 0.25
CPU_POOL_CAP_BYTES = 4 * GIB
# Below this many weights a CPU step is bound by the cost of calling operators: bf16 gains nothing
# and float32 is exact; a second thread gains little, and waits in a busy loop for its part of each
# operator, which stalls both as soon as the host has other work for the cores.
SMALL_MODEL_PARAMETERS = 50_000_000


def choose_device(name: str) -> torch.device:
    """Return the device of `EngineConfig.device`.

    Raises:
        ModelLoadError: the name is unknown, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name!r} is unknown; use 'auto', 'cpu' or 'cuda[:n]'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device {name!r} is not available here")
    if device.type == "cuda" and device.index is None:
        # Without a number it would be whatever is current on the thread that asks.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_dtype(requested: str, stored: str, config: ModelConfig, device: str) -> torch.dtype:
    """Return the dtype to compute in.

    "auto" is the checkpoint's own (`stored`), but float32 for small models on a CPU. float16 on a
    CPU becomes float32: torch multiplies float16 there slower than float32.
    """
    name = requested
    if requested == "auto":
        name = "float32" if _is_small(config, device) else stored
    if name == "float16" and device == "cpu":
        name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_threads(requested: int | None, config: ModelConfig, device: str) -> int | None:
    """Return how many threads an operator may use; None leaves torch's own choice."""
    return 1 if requested is None and _is_small(config, device) else requested


def pool_blocks(
    config: ModelConfig, settings: EngineConfig, max_tokens: int, dtype: torch.dtype, device: str
) -> int:
    """Return how many KV blocks to allocate.

    `settings.num_kv_blocks` if given; else enough for `max_batch` sequences of `max_tokens`, but
    at most a part of the free memory: on a CPU a quarter of it, and 4 GiB or one such sequence; on
    CUDA what `settings.gpu_memory_utilization` leaves.

    Raises:
        ModelLoadError: not even one block fits.
    """
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    longest = -(-max_tokens // settings.block_size)
    wanted = settings.max_batch * longest
    block = bytes_per_block(config, settings.block_size, dtype)
    if device == "cpu":
        cap = max(CPU_POOL_CAP_BYTES, block * longest)
        budget = min(int(available_bytes() * CPU_POOL_FRACTION), cap)
    else:
        budget = pool_budget(
            card_memory(torch.device(device)),
            settings.gpu_memory_utilization,
            step_bytes(config, settings, max_tokens, dtype),
        )
    fitting = budget // block
    if fitting < 1:
        raise ModelLoadError(f"no memory for one KV block of {block} bytes; {budget} may be used")
    return min(wanted, fitting)


def host_slots(
    config: ModelConfig, settings: EngineConfig, num_blocks: int, dtype: torch.dtype, device: str
) -> int:
    """Return how many KV blocks `host_kv_gib` holds, beside a pool of `num_blocks`.

    Raises:
        ModelLoadError: that is less than one, or more memory than is free.
    """
    if not settings.host_kv_gib:
        return 0
    wanted = int(settings.host_kv_gib * GIB)
    block = bytes_per_block(config, settings.block_size, dtype)
    # The pool of a CPU is host memory too, and not touched yet.
    free = available_bytes() - (num_blocks * block if device == "cpu" else 0)
    if wanted > free:
        raise ModelLoadError(
            f"host_kv_gib={settings.host_kv_gib} is more than the {max(0, free) / GIB:.1f} GiB of "
            "memory that are free"
        )
    if wanted < block:
        raise ModelLoadError(
            f"host_kv_gib={settings.host_kv_gib} holds not one KV block of {block} bytes"
        )
    return wanted // block


def _is_small(config: ModelConfig, device: str) -> bool:
    return device == "cpu" and config.num_parameters < SMALL_MODEL_PARAMETERS


def available_bytes() -> int:
    """Memory that could be used without swapping, as well as the platform tells."""
    try:
        # sysconf leaves out the page cache, which is large right after a checkpoint was read.
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        return page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # macOS has only the total
        return page * os.sysconf("SC_PHYS_PAGES") // 2
