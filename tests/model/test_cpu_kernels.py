"""The compiled CPU kernels against plain torch; what a row gets must not depend on its company."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.cpu import build
from qwen3_asgi.model.cpu import library as library_module
from qwen3_asgi.model.cpu.kernels import CpuKernels, cpu_kernels, unsupported
from qwen3_asgi.model.cpu.library import kernel_library
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.shapes import named_shape
from qwen3_asgi.scheduler.plan import RequestId, Row

BLOCK, BLOCKS = 16, 200
CPU = torch.device("cpu")
BASE = named_shape("Qwen3-0.6B")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# (start, length): ragged decodes, one across the border of a split, chunks with and without prefix.
SHAPES = [(0, 1), (511, 1), (512, 1), (700, 1), (0, 70), (37, 5), (130, 64), (63, 1)]


def shape(heads, kv_heads, dim):
    return dataclasses.replace(
        BASE, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, num_layers=1
    )


class World:
    """Sequences in scattered blocks, each with its prefix in the pool; the rest of it is NaN."""

    def __init__(self, config, dtype, shapes, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.config, self.dtype = config, dtype
        self.width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.pool = KVPool(config, BLOCKS, BLOCK, dtype, CPU)
        order = torch.randperm(BLOCKS, generator=generator).tolist()
        [layer] = self.pool.layers
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
        rotated = config.num_heads + config.num_kv_heads
        self.qk_norm = torch.rand(rotated, config.head_dim, generator=generator).to(dtype) + 0.5
        self.rows, self.fused = [], []
        for number, (start, length) in enumerate(shapes):
            count = -(-(start + length) // BLOCK)
            table, order = order[:count], order[count:]
            held = torch.randn(2, config.num_kv_heads, start, config.head_dim, generator=generator)
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start)]
            layer.keys[:, slots], layer.values[:, slots] = held.to(dtype)
            self.rows.append(
                Row(RequestId(str(number)), "prefill", [1] * length, start, table, None)
            )
            self.fused.append(torch.randn(length, self.width, generator=generator).to(dtype))

    def run(self, operators, which=None):
        """Output of the given sequences, in one batch."""
        which = range(len(self.rows)) if which is None else which
        rows = [self.rows[i] for i in which]
        batch = build_batch(
            rows,
            vocab_size=9,
            block_size=BLOCK,
            num_blocks=BLOCKS,
            max_tokens=4000,
            device=CPU,
            paged=operators.reads_tables,
        )
        angles = batch.positions[:, None] / torch.arange(1, self.config.head_dim // 2 + 1)
        cos = torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1)
        fused = torch.cat([self.fused[i] for i in which])
        out = operators.attention(batch, cos, sin)(fused, self.qk_norm, self.pool.layers[0])
        return dict(zip(which, out.split([len(row.token_ids) for row in rows]), strict=True))


def plain(config):
    return TorchOperators(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(16, 8, 128), (8, 2, 64), (5, 1, 128), (4, 4, 32), (14, 2, 16)],
)
def test_attention_is_that_of_plain_torch(library, heads, kv_heads, dim, dtype):
    config = shape(heads, kv_heads, dim)
    found = World(config, dtype, SHAPES).run(CpuKernels(library, config))
    expected = World(config, dtype, SHAPES).run(plain(config))
    for number in found:
        torch.testing.assert_close(
            found[number], expected[number], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_company_changes_no_bit(library, dtype):
    config = shape(8, 2, 64)
    operators = CpuKernels(library, config)
    together = World(config, dtype, SHAPES).run(operators)
    world = World(config, dtype, SHAPES)
    for number in range(len(SHAPES)):
        assert torch.equal(world.run(operators, [number])[number], together[number])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_with_one_order_chunks_and_decoding_change_no_bit(library, dtype):
    config = shape(8, 2, 64)
    operators = CpuKernels(library, config, one_order=True)
    whole = World(config, dtype, [(0, 150)]).run(operators)[0]
    world = World(config, dtype, [(0, 150)])
    row, fused = world.rows[0], world.fused[0]
    parts, start = [], 0
    for length in (70, 1, 1, 41, 37):
        world.rows = [dataclasses.replace(row, token_ids=[1] * length, start=start)]
        world.fused = [fused[start : start + length]]
        parts.append(world.run(operators)[0])
        start += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_threads_change_no_bit(library, dtype):
    config = shape(16, 8, 128)
    operators = CpuKernels(library, config)
    alone = World(config, dtype, SHAPES).run(operators)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = World(config, dtype, SHAPES).run(operators)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(alone[number], shared[number]) for number in alone)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_happens_to_rows_is_that_of_plain_torch(library, rows, dtype):
    ours, theirs = CpuKernels(library, BASE), plain(BASE)
    x, delta = torch.randn(2, rows, 1024).to(dtype)
    weight = torch.rand(1024).to(dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(ours.norm(x, weight), theirs.norm(x, weight), **close)
    mine, other = x.clone(), x.clone()
    found = ours.add_norm(mine, delta, weight)
    torch.testing.assert_close(found, theirs.add_norm(other, delta, weight), **close)
    assert torch.equal(mine, other)
    fused = torch.randn(rows, 2 * 3072).to(dtype) * 20
    torch.testing.assert_close(ours.silu_mul(fused), theirs.silu_mul(fused), **close)


def test_nan_reaches_its_own_row_only(library):
    config = shape(8, 2, 64)
    world = World(config, torch.bfloat16, [(20, 1), (30, 1), (0, 9)])
    world.fused[1][:] = float("nan")
    found = world.run(CpuKernels(library, config))
    assert found[1].isnan().all()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 80}, "head_dim 80"),
        ({"hidden_size": 1000}, "width 1000"),
        ({"num_heads": 17, "num_kv_heads": 1}, "17 heads"),
    ],
)
def test_other_shapes_are_left_to_plain_torch(change, words):
    config = dataclasses.replace(BASE, **change)
    assert words in unsupported(config, torch.float32)
    assert unsupported(BASE, torch.float16) == "dtype float16"
    assert unsupported(BASE, torch.bfloat16) is None


def test_without_a_compiler_there_are_no_kernels_and_one_line_says_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(library_module, "cache_folder", lambda: tmp_path)
    kernel_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "qwen3_asgi"):
            assert cpu_kernels(BASE, torch.float32) is None
    finally:
        kernel_library.cache_clear()
    [record] = caplog.records
    assert "no C++ compiler" in record.getMessage()


def test_a_library_of_something_else_is_refused(tmp_path):
    (tmp_path / f"kernels-{build.fingerprint()}.so").write_bytes(b"not a library")
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        build.load_library(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    with pytest.raises(build.BuildError, match="no such thing"):
        build.load_library(tmp_path)
    assert list(tmp_path.glob("*.so")) == []


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(build.Path, "home", lambda: tmp_path)
    folder = build.cache_folder()
    folder.chmod(0o777)
    with pytest.raises(build.BuildError, match="by others"):
        build.cache_folder()
