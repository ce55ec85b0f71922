"""Which files are opened when a path comes from a stranger: none outside of the allowed folders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import pytest

from qwen3_asgi.engine.adapter_files import MAX_PATH_CHARS, AdapterFolder
from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

NAME = "adapter_config.json"


class Places(NamedTuple):
    allowed: Path
    other: Path
    outside: Path


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Two allowed folders and one beside them, each with an adapter `one` that is its own."""
    places = Places(tmp_path / "allowed", tmp_path / "other", tmp_path / "allowed-not")
    for folder in places:
        (folder / "one").mkdir(parents=True)
        (folder / "one" / NAME).write_text(folder.name)
    return places


def read(places: Places, path: str | Path, name: str = NAME) -> str:
    folder = AdapterFolder(path, [places.allowed, places.other])
    return folder.read(name, 100).decode()


def assert_refused(places: Places, path: str | Path, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read(places, path)
    assert (refused.value.param, refused.value.code) == ("lora_path", "invalid_adapter")
    assert str(places.outside.parent) not in refused.value.message


def test_what_is_inside_is_read(places: Places) -> None:
    assert read(places, places.allowed / "one") == "allowed"
    assert read(places, places.other / "one") == "other"
    assert read(places, "one") == "allowed"  # relative: of the first that has it
    (places.other / "two").mkdir()
    (places.other / "two" / NAME).write_text("two")
    assert read(places, "two") == "two"
    assert AdapterFolder(places.allowed / "one", [places.allowed / "one"]).read(NAME, 100)


@pytest.mark.parametrize(
    "path",
    [
        "{outside}/one",
        "{root}/allowed-not/one",
        "/etc",
        "/",
    ],
)
def test_a_path_outside_is_refused(places: Places, path: str) -> None:
    given = path.format(outside=places.outside, root=places.outside.parent)
    assert_refused(places, given, "not inside of a folder")


@pytest.mark.parametrize(
    "path",
    ["../allowed-not/one", "{allowed}/../allowed-not/one", "one/../one", "..", r"..\allowed-not"],
)
def test_dots_are_refused_wherever_they_lead(places: Places, path: str) -> None:
    assert_refused(places, path.format(allowed=places.allowed), r"must not have '\.\.'")


@pytest.mark.parametrize("path", ["", "a\0b", "x" * (MAX_PATH_CHARS + 1), "\ud800"])
def test_what_is_no_path_is_refused(places: Places, path: str) -> None:
    assert_refused(places, path, "characters")


def test_what_is_not_there_is_refused(places: Places) -> None:
    assert_refused(places, "nothing", "no such folder")
    assert_refused(places, places.allowed / "one" / NAME, "no such folder")
    (places.allowed / "one" / NAME).unlink()
    assert_refused(places, "one", f"{NAME} is missing")
    with pytest.raises(InvalidRequest, match="no such folder"):
        AdapterFolder(places.allowed / "nothing")


def test_a_link_out_is_refused(places: Places) -> None:
    (places.allowed / "folder").symlink_to(places.outside / "one")
    assert_refused(places, "folder", "the folder is not inside of a folder")
    (places.allowed / "deep").symlink_to(places.outside)
    assert_refused(places, "deep/one", "the folder is not inside of a folder")
    (places.allowed / "file").mkdir()
    (places.allowed / "file" / NAME).symlink_to(places.outside / "one" / NAME)
    assert_refused(places, "file", "not inside of a folder")
    (places.allowed / "loop").mkdir()
    (places.allowed / "loop" / NAME).symlink_to(NAME)
    assert_refused(places, "loop", "cannot be read")


def test_a_link_that_stays_inside_is_followed(places: Places) -> None:
    """A cache of the hub is full of them."""
    (places.allowed / "blob").write_text("blob")
    (places.allowed / "snapshot").mkdir()
    (places.allowed / "snapshot" / NAME).symlink_to("../blob")
    (places.allowed / "main").symlink_to("snapshot")
    assert read(places, "main") == "blob"


def test_an_allowed_folder_may_be_a_link_itself(places: Places) -> None:
    link = places.allowed.parent / "link"
    link.symlink_to(places.allowed)
    for path in ("one", link / "one", places.allowed / "one"):
        assert AdapterFolder(path, [link]).read(NAME, 100) == b"allowed"
    with pytest.raises(InvalidRequest, match="not inside"):
        AdapterFolder(places.outside / "one", [link])


@pytest.mark.parametrize("at", ["file", "folder"])
def test_a_link_put_in_place_after_the_check_is_not_followed(
    places: Places, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = AdapterFolder("one", [places.allowed])
    checked = os.path.realpath

    def swap(path: str) -> str:
        real = checked(path)
        if at == "file":
            (places.allowed / "one" / NAME).unlink()
            (places.allowed / "one" / NAME).symlink_to(places.outside / "one" / NAME)
        else:
            (places.allowed / "one").rename(places.allowed / "before")
            (places.allowed / "one").symlink_to(places.outside / "one")
        return real

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        folder.read(NAME, 100)


@pytest.mark.parametrize("restricted", [True, False])
def test_only_plain_files_up_to_a_size_are_read(places: Places, *, restricted: bool) -> None:
    folder = AdapterFolder(places.allowed / "one", [places.allowed] if restricted else None)
    os.mkfifo(places.allowed / "one" / "pipe")  # opening it would wait for a writer
    (places.allowed / "one" / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InvalidRequest, match="is no file"):
            folder.read(name, 100)
    assert folder.read(NAME, len("allowed")) == b"allowed"
    with pytest.raises(InvalidRequest, match="larger than 6 bytes"):
        folder.read(NAME, len("allowed") - 1)


def test_no_descriptor_stays_open(places: Places) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    (places.allowed / "one" / "folder").mkdir()
    (places.allowed / "out").mkdir()
    (places.allowed / "out" / NAME).symlink_to(places.outside / "one" / NAME)
    before = descriptors()
    for _ in range(20):
        read(places, "one")
        for path, name in (("one", "folder"), ("one", "missing"), ("out", NAME)):
            with pytest.raises(InvalidRequest):
                read(places, path, name)
    assert descriptors() == before
