"""Event frames, byte for byte."""

from __future__ import annotations

import pytest

from qwen3_asgi.asgi.sse import DONE, KEEP_ALIVE, json_event


@pytest.mark.parametrize(
    ("payload", "frame"),
    [
        ({}, b"data: {}\n\n"),
        ({"a": [1, None]}, b'data: {"a":[1,null]}\n\n'),
        ("line\nbreak\r", b'data: "line\\nbreak\\r"\n\n'),
        ("é\u2028", 'data: "é\u2028"\n\n'.encode()),
    ],
)
def test_json_events(payload: object, frame: bytes) -> None:
    assert json_event(payload) == frame


def test_fixed_frames() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE == b": keep-alive\n\n"


def test_a_number_that_is_not_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_event(float("nan"))
