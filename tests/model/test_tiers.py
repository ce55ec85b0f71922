"""The contract of `KVTiers`, on real memory: what lands is what was there when it was begun."""

from __future__ import annotations

import threading

import pytest
import torch

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import memory, tiers
from qwen3_asgi.scheduler.executor import Place
from qwen3_asgi.scheduler.plan import RequestId, Row, StepPlan
from tests.model.checkpoints import load, write_checkpoint
from tests.model.tier_world import DEVICES, GatedTiers, World, copy

HOLD_SECONDS = 0.3


@pytest.fixture(params=["host", "file"])
def world(request, tmp_path):
    """One level below the device, with eight slots."""
    settings = {"host_slots": 8} if request.param == "host" else {"path": tmp_path / "kv"}
    with World(**settings) as world:
        world.level = request.param
        yield world


@pytest.fixture(params=DEVICES)
def host(request):
    """Host memory alone, below each device."""
    with World(host_slots=8, device=request.param) as world:
        yield world


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_bytes_come_back_as_they_were_from_every_level(tmp_path, dtype, device):
    with World(host_slots=4, path=tmp_path / "kv", dtype=dtype, device=device) as world:
        stored = [world.fill(block, seed=block) for block in (7, 2, 9)]
        down = [copy("device 7", "host 3", 1), copy("device 2", "host 0", 2)]
        on = [copy("host 3", "file 6", 1), copy("host 0", "file 1", 2)]
        back = [copy("file 6", "device 4", 1), copy("file 1", "device 5", 2)]
        also = [copy("host 0", "device 8", 2), copy("host 3", "device 10", 1)]
        for copies in (down, on, back, also):
            assert world.tiers.wait(world.tiers.begin(copies)) == {}
        assert [world.held(block) for block in (4, 5, 8, 10)] == [
            stored[0],
            stored[1],
            stored[1],
            stored[0],
        ]
        assert [world.held(block) for block in (7, 2, 9)] == stored, "a copy leaves its source"


def test_begin_returns_at_once_and_nothing_has_landed_before_it_has(world):
    world.tiers.gate.set_open(False)
    first = world.tiers.begin([copy("device 0", f"{world.level} 0")])
    second = world.tiers.begin([copy("device 1", f"{world.level} 1", 1)])
    assert world.tiers.landed() == []
    world.tiers.gate.let(1)
    world.tiers.wait(first)
    assert set(world.tiers.ended) == {first}
    world.tiers.gate.let(1)
    world.tiers.wait(second)
    assert world.tiers.landed() == []


@pytest.mark.parametrize("level", ["host", "file"])
def test_many_copies_of_one_begin_land_together(tmp_path, monkeypatch, level):
    monkeypatch.setattr(tiers, "PIECE_BLOCKS", 3)
    with World(host_slots=8, path=tmp_path / "kv") as world:
        stored = [world.fill(block, seed=block) for block in range(8)]
        world.tiers.gate.set_open(False)
        store = world.tiers.begin([copy(f"device {n}", f"{level} {n}", n) for n in range(8)])
        world.tiers.gate.let(2)
        world.tiers.gate.wait_for_arrivals(3)
        assert world.tiers.landed() == [], "a third of its pieces is still to come"
        world.tiers.gate.set_open(True)
        world.tiers.wait(store)
        load = [copy(f"{level} {n}", f"device {(n + 3) % 8}", n) for n in range(8)]
        world.tiers.broken = {Place("device", 0)}
        assert set(world.tiers.wait(world.tiers.begin(load))) == {3, 4, 5}, "its own piece"
        world.tiers.broken = set()
        assert world.tiers.wait(world.tiers.begin(load)) == {}
        assert [world.held((n + 3) % 8) for n in range(8)] == stored


def test_stores_come_before_loads_and_loads_before_what_moves_on(tmp_path):
    with World(host_slots=8, path=tmp_path / "kv") as world:
        for block in range(3):
            world.tiers.wait(world.tiers.begin([copy(f"device {block}", f"host {block}", block)]))
        world.tiers.copied.clear()
        world.tiers.gate.set_open(False)
        begin = world.tiers.begin
        held = begin([copy("host 0", "device 4")])
        world.tiers.gate.wait_for_arrivals(4)
        mixed = begin([copy("device 5", "host 5", 5), copy("host 1", "file 1", 1)])
        load = begin([copy("host 2", "device 6", 2)])
        store = begin([copy("device 7", "host 7", 7)])
        world.tiers.gate.set_open(True)
        world.tiers.wait(held, mixed, load, store)
        assert world.tiers.copied == [
            ("host", "device", held),
            ("device", "host", mixed),
            ("device", "host", store),
            ("host", "device", load),
            ("host", "file", mixed),
        ]


def check_that_a_step_waits(world, level):
    """The copy is held as long as a step that does not wait would need to spoil it."""
    tiers_, stored = world.tiers, world.fill(3, seed=1)
    overwritten = threading.Event()
    tiers_.gate.pass_through = lambda: overwritten.wait(HOLD_SECONDS)
    store = tiers_.begin([copy("device 3", f"{level} 0")])
    tiers_.before_step()
    world.fill(3, seed=2)
    overwritten.set()
    tiers_.wait(store)
    tiers_.wait(tiers_.begin([copy(f"{level} 0", "device 5")]))
    assert world.held(5) == stored


def test_a_step_waits_for_the_stores_before_it(world):
    check_that_a_step_waits(world, world.level)


def test_a_step_on_any_device_waits_for_the_stores_before_it(host):
    check_that_a_step_waits(host, "host")


def test_a_step_waits_for_no_load(world):
    world.tiers.wait(world.tiers.begin([copy("device 0", f"{world.level} 0")]))
    world.tiers.gate.set_open(False)
    load = world.tiers.begin([copy(f"{world.level} 0", "device 1")])
    super(GatedTiers, world.tiers).before_step()  # it would hang
    world.tiers.gate.set_open(True)
    world.tiers.wait(load)


def test_a_load_into_a_block_whose_store_was_begun_before_comes_after_it(host):
    old, new = host.fill(0, seed=1), host.fill(1, seed=2)
    host.tiers.wait(host.tiers.begin([copy("device 1", "host 1", 1)]))
    host.tiers.gate.set_open(False)
    store = host.tiers.begin([copy("device 0", "host 0")])
    load = host.tiers.begin([copy("host 1", "device 0", 1)])
    host.tiers.gate.set_open(True)
    host.tiers.wait(store, load)
    assert host.held(0) == new
    host.tiers.wait(host.tiers.begin([copy("host 0", "device 5")]))
    assert host.held(5) == old


def test_a_failing_copy_is_told_and_the_thread_goes_on(world, caplog):
    level = world.level
    stored = world.fill(0, seed=1)
    world.tiers.broken.add(Place(level, 2))
    failing = [copy("device 0", f"{level} {slot}", slot) for slot in (2, 3)]
    assert set(world.tiers.wait(world.tiers.begin(failing))) == {0, 1}
    assert "broken on purpose" in caplog.text
    world.tiers.before_step()  # a failed store is not waited for either
    world.tiers.wait(world.tiers.begin([copy("device 0", f"{level} 3", 3)]))
    assert world.tiers.wait(world.tiers.begin([copy(f"{level} 3", "device 6", 3)])) == {}
    assert world.held(6) == stored


def test_places_that_do_not_exist_fail_their_copies_only(world):
    ticket = world.tiers.begin([copy("device 99", f"{world.level} 0")])
    assert set(world.tiers.wait(ticket)) == {0}
    assert world.tiers.wait(world.tiers.begin([copy("device 1", f"{world.level} 0")])) == {}


def test_a_waker_that_fails_does_not_end_the_thread(world, caplog):
    def fail():
        raise ValueError("the loop is closed")

    wake, world.tiers.wake = world.tiers.wake, fail
    first = world.tiers.begin([copy("device 0", f"{world.level} 0")])
    world.tiers.before_step()
    world.tiers.wake = wake
    world.tiers.gate.set_open(True)
    world.tiers.wait(world.tiers.begin([copy("device 1", f"{world.level} 1", 1)]))
    assert first in world.tiers.ended
    assert "nobody could be told" in caplog.text


def test_close_finishes_what_was_begun(tmp_path):
    world = World(host_slots=4, path=tmp_path / "kv")
    world.fill(0, seed=1)
    world.tiers.gate.set_open(False)
    store = world.tiers.begin([copy("device 0", "host 0")])
    move = world.tiers.begin([copy("host 0", "file 3")])
    world.tiers.close()
    world.tiers.close()
    assert {end.ticket: end.failed for end in world.tiers.landed()} == {store: {}, move: {}}
    assert not world.tiers._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        world.tiers.begin([copy("device 0", "host 0")])
    with World(path=tmp_path / "kv") as again:
        assert list(again.tiers.restored()) == [3]


# ---- in an executor ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied")


BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * 4


def gib(blocks):
    return (blocks + 0.5) * BLOCK_BYTES / memory.GIB


def test_the_settings_say_how_many_blocks_there_are(folder, tmp_path):
    assert load(folder).tiers is None
    executor = load(folder, host_kv_gib=gib(5))
    assert (executor.tiers.host_slots, executor.tiers.file_slots) == (5, 0)
    executor.close()
    path = tmp_path / "kv"
    executor = load(folder, kv_file=str(path), kv_file_gib=gib(9))
    tiers_ = executor.tiers
    executor.close()
    # Two pages and a record for each come off.
    assert (tiers_.host_slots, tiers_.file_slots) == (0, 6)
    assert gib(8) * memory.GIB - 2 * 4096 < path.stat().st_size < gib(9) * memory.GIB


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_kv_gib": 1e6}, "GiB of memory that are free"),
        ({"host_kv_gib": 1e-10}, "holds not one KV block"),
        ({"host_kv_gib": 1e-7}, "holds not one KV block"),
        ({"kv_file": "kv", "kv_file_gib": 1e-6}, "holds not one KV block"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folder, tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=words):
        load(folder, **settings)


def test_the_pool_of_a_cpu_counts_as_taken(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 70 * BLOCK_BYTES)
    load(folder, num_kv_blocks=64, host_kv_gib=gib(5)).close()
    with pytest.raises(ModelLoadError, match="that are free"):
        load(folder, num_kv_blocks=64, host_kv_gib=gib(6))


@pytest.mark.parametrize(
    "settings",
    [
        {"host_kv_gib": -1.0},
        {"host_kv_gib": float("nan")},
        {"kv_file_gib": 0.0},
        {"kv_file": ""},
        {"host_kv_gib": 1.0, "prefix_cache": False},
        {"kv_file": "kv", "prefix_cache": False},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig(**settings)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_copied_for_forks(folder, device):
    executor = load(folder, device=device, dtype="float32")
    tokens = [5, 9, 200, 31, 77, 4, 18, 250, 63]
    first = Row(RequestId("a"), "prefill", tokens, 0, [0, 1, 2], None)
    expected = executor.forward_logits([first])[-1]
    executor.copy_blocks([(1, 40), (2, 9)])
    last = Row(RequestId("b"), "prefill", tokens[-1:], 8, [0, 40, 9], None)
    torch.testing.assert_close(executor.forward_logits([last])[-1], expected)
    executor.copy_blocks([(0, 1), (1, 0)])  # both are read first
    last.block_table = [1, 0, 9]
    torch.testing.assert_close(executor.forward_logits([last])[-1], expected)


@pytest.mark.parametrize("writer", ["step", "copy_blocks"])
def test_what_an_executor_writes_waits_for_the_stores(folder, monkeypatch, writer):
    monkeypatch.setattr(tiers, "TorchTiers", GatedTiers)
    executor = load(folder, host_kv_gib=gib(4))
    row = Row(RequestId("a"), "prefill", [5, 9, 200, 31], 0, [0], None)
    executor.step(StepPlan(0, (row,)))
    _, pool = executor._loaded
    held = [cache[:, :4].clone() for layer in pool.layers for cache in layer]
    overwritten = threading.Event()
    executor.tiers.gate.pass_through = lambda: overwritten.wait(HOLD_SECONDS)
    store = executor.tiers.begin([copy("device 0", "host 0")])
    if writer == "step":
        row.token_ids = [3, 3, 3, 3]
        executor.step(StepPlan(1, (row,)))
    else:
        executor.copy_blocks([(7, 0)])
    overwritten.set()
    executor.tiers.wait(store)
    executor.tiers.wait(executor.tiers.begin([copy("host 0", "device 3")]))
    found = [cache[:, 12:16] for layer in pool.layers for cache in layer]
    assert all(map(torch.equal, found, held))
    executor.close()


def test_whoever_waits_is_woken_on_the_copy_thread(folder):
    executor = load(folder, host_kv_gib=gib(4))
    woken, threads = threading.Event(), []

    def wake():
        threads.append(threading.current_thread())
        woken.set()

    executor.on_landed(wake)
    ticket = executor.tiers.begin([copy("device 0", "host 0")])
    assert woken.wait(60)
    assert [end.ticket for end in executor.tiers.landed()] == [ticket]
    assert threads[0] is not threading.current_thread()
    executor.close()
