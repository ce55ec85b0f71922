"""What batch-invariant mode is made of: products, the plain operators, adapters, sums, kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from qwen3_asgi.model import invariant_tiles
from qwen3_asgi.model.cpu.library import kernel_library
from qwen3_asgi.model.cuda.attention import PIECE_TOKENS
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.invariant import invariant_linear
from qwen3_asgi.model.invariant_cuda import Programs
from qwen3_asgi.model.invariant_operators import TiledOperators
from qwen3_asgi.model.invariant_tiles import TILE_ROWS, Tiles, tile_rows
from qwen3_asgi.model.lora import Adapter, Part
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.rope import FIRST_TABLE_POSITIONS, RotaryTable
from qwen3_asgi.model.shapes import named_shape
from qwen3_asgi.model.sums import log_sum_exp, total_of
from tests.model.checkpoints import write_checkpoint
from tests.model.cuda.world import DEVICE, batch_of, close, needs_kernels, random_kv, sequences
from tests.model.invariant_world import DTYPES, LENGTHS, PATHS, World, different, load_on
from tests.model.test_cpu_kernels import World as AttentionWorld
from tests.model.test_cpu_kernels import shape

# out, in: whole vectors and not, of the small test model and of Qwen3-0.6B.
SHAPES = [(128, 48), (37, 5), (1, 80), (70, 300)]
ROWS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 32, 33, 65, 130)


def random(*size, dtype=torch.float32, seed=1):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


needs_library = pytest.mark.skipif(
    kernel_library()[0] is None, reason=f"no kernels on this machine: {kernel_library()[1]}"
)


@pytest.fixture(
    params=[
        pytest.param("panels", marks=needs_library),
        "tiles",
        pytest.param("programs", marks=needs_kernels),
    ]
)
def product(request):
    """Makes a product of a weight, as `invariant_linear` does on its devices."""
    if request.param == "programs":
        return lambda weight: Programs(weight.to(DEVICE))
    return invariant_linear if request.param == "panels" else Tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_rows_product_depends_on_that_row_alone(product, columns, depth, dtype):
    weight, x = random(columns, depth, dtype=dtype), random(max(ROWS), depth, dtype=dtype, seed=2)
    multiply = product(weight)
    x = x.to(DEVICE) if isinstance(multiply, Programs) else x
    whole = multiply(x)
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        whole.cpu(), functional.linear(x.cpu(), weight), rtol=rounding, atol=rounding * depth**0.5
    )
    for rows in ROWS:
        assert torch.equal(multiply(x[:rows]), whole[:rows])
        assert torch.equal(multiply(x[-rows:]), whole[-rows:])
        # One row everywhere: no place is treated unlike the others.
        places = multiply(x[3:4].expand(rows, -1))
        assert torch.equal(places, whole[3:4].expand(rows, -1))


def test_gaps_between_rows_do_not_matter(product):
    weight = random(24, 16)
    multiply = product(weight)
    x = random(5, 40)
    x = x.to(DEVICE) if isinstance(multiply, Programs) else x
    assert torch.equal(multiply(x[:, :16]), multiply(x[:, :16].contiguous()))


def test_a_row_of_nan_stays_alone(product):
    multiply = product(random(24, 16))
    x = random(5, 16)
    x = x.to(DEVICE) if isinstance(multiply, Programs) else x
    clean = multiply(x)
    x[2] = float("nan")
    found = multiply(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_are_multiplied_alike_by_any_number_of_threads(dtype):
    multiply, x = invariant_linear(random(300, 500, dtype=dtype)), random(70, 500, dtype=dtype)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [multiply(x), multiply(x[9:10])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found[::2])
    assert all(torch.equal(each[0], found[0][9]) for each in found[1::2])


def test_a_tile_has_as_many_rows_as_change_nothing():
    weight = random(24, 16)

    def uneven_above(limit):
        def product(x):
            y = functional.linear(x[:1], weight).expand(len(x), -1).clone()
            y[limit:] += 1e-6
            return y

        return product

    assert tile_rows(uneven_above(100), weight) == TILE_ROWS[0] == 32
    assert tile_rows(uneven_above(9), weight) == 8
    assert tile_rows(uneven_above(1), weight) == 1


def test_products_without_kernels_are_always_of_one_shape(monkeypatch):
    shapes = set()
    multiply = Tiles(random(24, 16))

    class Seen:
        shape = (24, 16)

        def __call__(self, x):
            shapes.add((tuple(x.shape), x.data_ptr() % 64))
            return functional.linear(x, random(24, 16))

    monkeypatch.setattr(multiply, "_linear", Seen())
    for rows in ROWS:
        multiply(random(rows, 16))
    assert len(shapes) == 1
    assert invariant_tiles.TILE_ROWS[-1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (5, 1, 24), (4, 4, 32)])
def test_plain_attention_is_that_of_torch_in_any_cut(heads, kv_heads, dim, dtype):
    config = shape(heads, kv_heads, dim)
    sizes = (heads, kv_heads, dim, config.rms_norm_eps)
    shapes = [(0, 1), (15, 1), (16, 1), (127, 1), (128, 1), (300, 1), (0, 70), (37, 5), (130, 64)]
    found = AttentionWorld(config, dtype, shapes).run(TiledOperators(*sizes))
    expected = AttentionWorld(config, dtype, shapes).run(TorchOperators(*sizes))
    for number in found:
        torch.testing.assert_close(
            found[number],
            expected[number],
            rtol=2e-2,
            atol=2e-5 if dtype == torch.float32 else 2e-2,
        )
    whole = AttentionWorld(config, dtype, [(0, 150)]).run(TiledOperators(*sizes))[0]
    world = AttentionWorld(config, dtype, [(0, 150)])
    [row], [fused] = world.rows, world.fused
    parts, start = [], 0
    for length in (70, 1, 1, 41, 37):
        world.rows = [dataclasses.replace(row, token_ids=[1] * length, start=start)]
        world.fused = [fused[start : start + length]]
        parts.append(world.run(TiledOperators(*sizes))[0])
        start += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_activation_is_the_same_wherever_threads_part(dtype):
    operators = TiledOperators(4, 2, 16, 1e-6)
    fused = random(700, 2 * 120, dtype=dtype) * 5
    whole = operators.silu_mul(fused.clone())
    usual = TorchOperators(4, 2, 16, 1e-6).silu_mul(fused.clone())
    torch.testing.assert_close(
        whole, usual, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for first, last in ((0, 1), (0, 333), (5, 699), (17, 18), (0, 700)):
            found = operators.silu_mul(fused[first:last].clone())
            assert torch.equal(found, whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_sums_over_a_vocabulary_do_not_depend_on_threads():
    rows = random(12, 151_936) * 4
    weights = torch.exp(rows.double() - rows.amax())
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([*map(log_sum_exp, rows), *map(total_of, weights)])
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, found[0], strict=True))
    torch.testing.assert_close(torch.stack(found[0][:12]), rows.logsumexp(1), rtol=1e-5, atol=1e-5)
    assert float(log_sum_exp(torch.tensor([1000.0, 1000.0]))) == pytest.approx(1000.6931)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_table_of_positions_that_has_grown_has_the_same_beginning(threads):
    rope = named_shape("Qwen3-0.6B").rope
    before = torch.get_num_threads()
    table = RotaryTable(rope, 128, torch.device("cpu"))
    positions = torch.arange(FIRST_TABLE_POSITIONS)
    small = table.lookup(positions, FIRST_TABLE_POSITIONS - 1)
    try:
        torch.set_num_threads(threads)
        for last in (FIRST_TABLE_POSITIONS, 9_001, 40_959):
            grown = RotaryTable(rope, 128, torch.device("cpu")).lookup(positions, last)
            assert all(torch.equal(a, b) for a, b in zip(small, grown, strict=True))
    finally:
        torch.set_num_threads(before)


def test_adapted_rows_do_not_depend_on_their_company(tmp_path):
    """Ranks that fill no vector, for some modules only."""
    generator = torch.Generator().manual_seed(3)

    def part(rank, out, into, start):
        a = torch.randn(rank, into, generator=generator) * 0.2
        return Part(a, torch.randn(out, rank, generator=generator) * 0.2, start)

    layer = {
        "qkv": (part(5, 64, 48, 0), part(3, 32, 48, 96)),
        "output": (part(8, 48, 64, 0),),
        "down": (part(1, 48, 80, 0),),
    }
    adapter = Adapter((layer, {}, layer))
    folder = write_checkpoint(tmp_path, "tied")
    for path in PATHS:
        for dtype in DTYPES:
            executor = load_on(path, folder, dtype=dtype, batch_invariant=True)
            executor.load_adapter("x", adapter)
            base, adapted = World(executor), World(executor, adapter="x")
            assert different(base.whole[0], adapted.whole[0]) > 0
            for size in (1, 7, 40):
                for start in range(0, LENGTHS[0], size):
                    end = min(start + size, LENGTHS[0])
                    rows = [
                        base.row("b", 4, 0, 1 + start % 50, base.table(1)),
                        adapted.row("a", 0, start, end, adapted.table(0)),
                        adapted.row("c", 3, 0, 1 + start % 17, adapted.table(2)),
                    ]
                    found = executor.forward_logits(rows).split([len(r.token_ids) for r in rows])
                    assert different(found[1], adapted.whole[0][start:end]) == 0
                    assert different(found[0], base.whole[4][: 1 + start % 50]) == 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_decoding_is_as_if_in_a_chunk(dtype):
    """Beyond the length at which the decode kernel would cut a sequence."""
    config = shape(4, 2, 16)
    first, end = PIECE_TOKENS + 60, PIECE_TOKENS + 68
    [row], num_blocks = sequences([(0, end)], 16)
    fused = random(end, 8 * 16, dtype=dtype).to(DEVICE)
    qk_norm = random(6, 16, dtype=dtype).to(DEVICE)
    kv = random_kv(2, num_blocks * 16, 16, dtype)
    angles = torch.arange(end, device=DEVICE)[:, None] / torch.arange(1, 9, device=DEVICE)
    cos = torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1)

    def run(start, length, *, one_order=True):
        operators = CudaOperators(4, 2, 16, config.rms_norm_eps, one_order=one_order)
        own = slice(start, start + length)
        part = dataclasses.replace(row, token_ids=[1] * length, start=start)
        batch = batch_of([part], num_blocks, 16)
        return operators.attention(batch, cos[own], sin[own])(fused[own].clone(), qk_norm, kv)

    whole = run(first, end - first)
    for start, length in [(end - 1, 1), (first, 1), (first + 2, 5)]:
        found = run(start, length)
        assert torch.equal(found, whole[start - first : start - first + length])
    close(run(end - 1, 1, one_order=False), whole[-1:])
