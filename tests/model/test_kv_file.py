"""The file of KV blocks: what a restart finds in it, and what it must not find."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import pytest

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import kv_file
from qwen3_asgi.model.checkpoint import Checkpoint
from qwen3_asgi.model.fingerprint import fingerprint
from qwen3_asgi.model.kv_file import DamagedBlock, FileLayout, KVFile, slots_for
from tests.model.checkpoints import edit_config, load, write_checkpoint
from tests.model.tier_world import World, content, copy

LAYOUT = FileLayout(
    layers=2,
    kv_heads=1,
    head_dim=5,
    block_size=4,
    dtype="torch.float32",
    data_bytes=321,
    slots=6,
    fingerprint="one",
)
DATA = memoryview(bytes(range(256)) + bytes(65))


def open_file(path, **changes):
    return KVFile(str(path), FileLayout(**{**kv_file.asdict(LAYOUT), **changes}))


@pytest.fixture
def path(tmp_path):
    """A closed file with three blocks: slots 4, 0 and 2, in this order."""
    file = open_file(tmp_path / "kv")
    for number, slot in enumerate((4, 0, 2)):
        file.write(slot, content(number), DATA)
    file.close()
    return tmp_path / "kv"


def data_of(file, slot, block):
    into = bytearray(LAYOUT.data_bytes)
    file.read(slot, block, memoryview(into))
    return bytes(into)


def flip(path, offset):
    with path.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))


def test_a_restart_finds_the_blocks_the_oldest_first(path):
    file = open_file(path)
    assert list(file.restored().items()) == [(4, content(0)), (0, content(1)), (2, content(2))]
    assert data_of(file, 0, content(1)) == DATA
    file.write(4, content(7), DATA)
    file.forget([0])
    file.close()
    file = open_file(path)
    assert list(file.restored().items()) == [(2, content(2)), (4, content(7))]
    file.close()


def test_only_the_owner_may_read_what_others_have_said(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_all_space_is_reserved_at_the_start(tmp_path):
    file = open_file(tmp_path / "kv", slots=1000)
    assert (tmp_path / "kv").stat().st_blocks * 512 >= 1000 * LAYOUT.data_bytes
    file.close()


def test_the_size_is_kept(tmp_path):
    size = 1_000_000
    slots = slots_for(size, LAYOUT.data_bytes, LAYOUT.block_size)
    file = open_file(tmp_path / "kv", slots=slots)
    file.close()
    used = (tmp_path / "kv").stat().st_size
    assert size - 2 * 4096 < used <= size
    assert slots_for(5000, LAYOUT.data_bytes, LAYOUT.block_size) == 0


@pytest.mark.parametrize("byte", [0, 160, 320])
def test_damaged_data_is_noticed_and_forgotten(path, byte):
    flip(path, LAYOUT.data_offset + 2 * LAYOUT.data_bytes + byte)
    file = open_file(path)
    assert 2 in file.restored(), "the data are checked when they are read"
    with pytest.raises(DamagedBlock):
        data_of(file, 2, content(2))
    assert data_of(file, 4, content(0)) == DATA
    file.close()
    file = open_file(path)
    assert set(file.restored()) == {4, 0}
    file.close()


# Offsets in a record: the sequence number's last byte is no content, all others are.
@pytest.mark.parametrize("byte", [0, 16, 31, 32, 47, 64, 79])
def test_a_damaged_record_is_not_restored(path, byte):
    flip(path, kv_file.HEADER_BYTES + 2 * LAYOUT.record_bytes + byte)
    file = open_file(path)
    assert set(file.restored()) == {4, 0}
    file.close()


def test_a_damaged_checksum_is_damage(path):
    flip(path, kv_file.HEADER_BYTES + 2 * LAYOUT.record_bytes + 50)
    file = open_file(path)
    with pytest.raises(DamagedBlock):
        data_of(file, 2, content(2))
    file.close()


def test_a_slot_that_holds_something_else_by_now_is_damage(path):
    file = open_file(path)
    with pytest.raises(DamagedBlock):
        data_of(file, 2, content(3))
    file.close()


def test_a_write_that_is_cut_off_leaves_nothing_valid(path, monkeypatch):
    """Killed after half of the data, over a slot that was valid."""
    file = open_file(path)
    pwrite = os.pwrite

    def cut_off(fd, data, offset):
        if len(data) > 300:
            pwrite(fd, data[:100], offset)
            raise OSError(errno.EIO, "killed here")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", cut_off)
    with pytest.raises(OSError, match="killed here"):
        file.write(2, content(9), memoryview(bytes(LAYOUT.data_bytes)))
    file.close()
    file = open_file(path)
    assert set(file.restored()) == {4, 0}
    file.close()


def test_short_writes_and_reads_are_continued(path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:50], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:7]], at))
    file = open_file(path)
    file.write(5, content(5), DATA)
    assert data_of(file, 5, content(5)) == DATA
    file.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "two"}, "fingerprint differ"),
        ({"dtype": "torch.bfloat16"}, "dtype differ"),
        ({"layers": 3, "slots": 5}, "layers, slots differ"),
        ({"block_size": 8}, "block_size differ"),
    ],
)
def test_a_file_of_something_else_is_started_empty(path, caplog, changes, words):
    file = open_file(path, **changes)
    assert file.restored() == {}
    assert f"{path} is started empty" in caplog.text
    assert words in caplog.text
    file.close()
    file = open_file(path)
    assert file.restored() == {}, "nothing of before has survived"
    file.close()


def test_a_file_of_another_version_is_started_empty(path, caplog, monkeypatch):
    monkeypatch.setattr(kv_file, "VERSION", 2)
    file = open_file(path)
    assert file.restored() == {}
    assert "it is of version 1, this is 2" in caplog.text
    file.close()


@pytest.mark.parametrize("size", [8, 12, 100, 4096, 5000, -1])
def test_a_truncated_file_is_started_empty(path, caplog, size):
    os.truncate(path, size if size > 0 else LAYOUT.file_bytes - 1)
    file = open_file(path)
    assert file.restored() == {}
    assert "is started empty" in caplog.text
    file.write(5, content(1), DATA)
    assert data_of(file, 5, content(1)) == DATA
    file.close()


@pytest.mark.parametrize("offset", [13, 20, 40, 150])
def test_a_damaged_header_starts_it_empty(path, caplog, offset):
    flip(path, offset)
    file = open_file(path)
    assert file.restored() == {}
    assert "is started empty" in caplog.text
    file.close()


@pytest.mark.parametrize("start", [b"", b"\0" * 3, b"\0" * 5000])
def test_an_empty_file_or_one_that_was_never_finished_is_made(tmp_path, start):
    path = tmp_path / "kv"
    path.write_bytes(start)
    file = open_file(path)
    assert path.stat().st_size == LAYOUT.file_bytes
    file.close()


def test_somebody_elses_file_is_left_alone(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(ModelLoadError, match="is something else"):
        open_file(path)
    assert path.read_bytes() == b"precious"


def test_two_engines_do_not_share_a_file(path):
    first = open_file(path)
    with pytest.raises(ModelLoadError, match="in use by another engine"):
        open_file(path)
    first.close()
    open_file(path).close()


@pytest.mark.parametrize("name", ["", "missing/kv", "\0"])
def test_a_path_that_cannot_be_opened_is_named(tmp_path, name):
    path = f"{tmp_path}/{name}"
    with pytest.raises(ModelLoadError, match="kv_file"):
        open_file(path)


def test_a_device_is_no_kv_file():
    with pytest.raises(ModelLoadError, match="not a regular file"):
        open_file("/dev/null")


def test_a_full_disk_shows_at_the_start(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = tmp_path / "kv"
    with pytest.raises(ModelLoadError, match="No space left"):
        open_file(path)
    assert path.stat().st_size == 0
    monkeypatch.undo()
    open_file(path).close()


def test_where_space_cannot_be_reserved_the_file_grows(tmp_path, monkeypatch):
    def unknown(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    file = open_file(tmp_path / "kv")
    file.write(5, content(1), DATA)
    assert data_of(file, 5, content(1)) == DATA
    file.close()


# ---- through the tiers ----


def test_a_disk_that_fills_up_later_fails_copies_and_nothing_else(tmp_path, monkeypatch, caplog):
    with World(path=tmp_path / "kv") as world:
        stored = world.fill(0, seed=1)
        world.tiers.wait(world.tiers.begin([copy("device 0", "file 0")]))
        pwrite = os.pwrite

        def full(fd, data, offset):
            if len(data) >= world.pool.bytes_per_block:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
        failed = world.tiers.wait(
            world.tiers.begin([copy(f"device {n}", f"file {n}", n) for n in (1, 2)])
        )
        assert set(failed) == {0, 1}
        assert "No space left" in failed[0]
        assert "2 KV blocks could not be copied" in caplog.text
        monkeypatch.undo()
        assert world.tiers.wait(world.tiers.begin([copy("file 0", "device 5")])) == {}
        assert world.held(5) == stored


def test_damage_fails_one_copy_of_many(tmp_path):
    path = tmp_path / "kv"
    with World(path=path) as world:
        stored = [world.fill(block, seed=block) for block in range(4)]
        down = [copy(f"device {n}", f"file {n}", n) for n in range(4)]
        world.tiers.wait(world.tiers.begin(down))
        layout, size = world.tiers._file.layout, world.pool.bytes_per_block
    flip(path, layout.data_offset + 2 * size + 17)
    with World(path=path) as world:
        assert set(world.tiers.restored()) == {0, 1, 2, 3}
        up = [copy(f"file {n}", f"device {n + 4}", n) for n in range(4)]
        failed = world.tiers.wait(world.tiers.begin(up))
        assert set(failed) == {2}
        assert "damaged" in failed[2]
        assert [world.held(n + 4) for n in (0, 1, 3)] == [stored[n] for n in (0, 1, 3)]
        world.tiers.forget([1])
    with World(path=path) as world:
        assert set(world.tiers.restored()) == {0, 3}
    with World(path=path, fingerprint="two") as world:
        assert world.tiers.restored() == {}


# ---- fingerprints ----


@pytest.mark.parametrize("kind", ["tied", "untied_sharded"])
def test_checkpoints_of_one_shape_have_different_fingerprints(tmp_path, kind):
    folder = write_checkpoint(tmp_path / "a", kind)
    other = tmp_path / "b"
    shutil.copytree(folder, other)

    def of(folder):
        return fingerprint(folder, Checkpoint(folder).file_names)

    assert of(folder) == of(other)
    # A single weight of the last tensor: that is what a sample of each tensor must find.
    last = other / Checkpoint(other).file_names[-1]
    flip(last, last.stat().st_size - 30)
    found = of(other)
    assert found != of(folder)
    edit_config(other, lambda raw: raw.update(rope_parameters={"rope_theta": 3.0}))
    assert of(other) != found


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        fingerprint(tmp_path, [])


def test_two_checkpoints_do_not_share_a_file(tmp_path, caplog):
    settings = {"kv_file": str(tmp_path / "kv"), "kv_file_gib": 0.001}
    for kind in ("tied", "untied_sharded", "tied"):
        executor = load(write_checkpoint(tmp_path / kind, kind), **settings)
        assert executor.tiers.restored() == {}
        executor.tiers.begin([copy("device 0", "file 0")])
        executor.close()
    assert caplog.text.count("its fingerprint differ") == 2
    executor = load(tmp_path / "tied", **settings)
    assert set(executor.tiers.restored()) == {0}
    executor.close()
