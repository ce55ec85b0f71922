"""What was freed on a thread goes back to the system."""

from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from qwen3_asgi.bench.processes import PROC, memory_bytes
from qwen3_asgi.model.heap import give_back

MIB = 2**20
COUNT, SIZE = 2048, 64 * 1024


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not PROC.exists(), reason="heaps of threads are glibc's"
)
def test_a_thread_s_freed_memory_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    before = memory_bytes()[0]
    last: list[int] = []

    def load() -> None:
        held = [libc.malloc(SIZE) for _ in range(COUNT)]
        for each in held:
            ctypes.memset(each, 1, SIZE)
        # The newest stays: what lies before it is not at the end of the heap.
        last.append(held.pop())
        for each in held:
            libc.free(each)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    kept = memory_bytes()[0] - before
    give_back()
    left = memory_bytes()[0] - before
    libc.free(last[0])
    assert kept - left > 20 * MIB
    assert left < 40 * MIB


def test_without_that_function_nothing_happens(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)  # returns None, which has no such function
    give_back()
    assert asked == [None]
