"""Memory that was freed, back to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Let the C library return what it keeps of freed memory; without glibc, nothing happens.

    glibc gives every thread but the first a heap of its own, and such a heap shrinks only at its
    end. A model is loaded on a thread, through copies of each matrix that are freed at once:
    without this a small model's process keeps hundreds of megabytes that are of no use.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library, or none that is shared
        return
