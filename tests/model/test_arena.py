"""Memory of weights: disjoint, aligned, and no more of it than there are values."""

from __future__ import annotations

import ctypes

import pytest
import torch

from qwen3_asgi.model.cpu import arena as module
from qwen3_asgi.model.cpu.arena import CHUNK_BYTES, PAGE_BYTES, Arena


def test_tensors_do_not_touch_each_other():
    arena = Arena()
    sizes = [(3, torch.bfloat16), (100, torch.int8), (CHUNK_BYTES, torch.int8), (7, torch.float32)]
    taken = [arena.empty(count, dtype) for count, dtype in sizes]
    for number, tensor in enumerate(taken):
        tensor.fill_(number + 1)
    for number, ((count, dtype), tensor) in enumerate(zip(sizes, taken, strict=True)):
        assert (tensor.shape, tensor.dtype) == ((count,), dtype)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number + 1).all())


def test_a_piece_begins_with_a_page_and_is_used_up(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", PAGE_BYTES)
    arena = Arena()
    first = arena.empty(PAGE_BYTES - 64, torch.int8)
    last = arena.empty(64, torch.int8)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert last.data_ptr() == first.data_ptr() + PAGE_BYTES - 64
    assert last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    beyond = arena.empty(1, torch.int8)
    assert beyond.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_systems_without_such_pages_give_their_own(monkeypatch, error):
    def missing(name):
        raise error("not here")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Arena().empty(5, torch.float32).shape == (5,)
