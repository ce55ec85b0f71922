"""Charts are XML that a browser draws: every point in its place, names as they were given."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from qwen3_asgi.bench.chart import Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_by_the_power_of_two_and_by_their_height():
    lines = [
        Series("a < b & c", ((1, 10.0), (4, 40.0), (256, 0.0))),
        Series("other", ((16, 20.0),)),
    ]
    root = ET.fromstring(line_chart("tok/s & more", "clients", lines))
    points = [
        (float(each.attrib["cx"]), float(each.attrib["cy"]), each.findtext(f"{SVG}title"))
        for each in root.iter(f"{SVG}circle")
        if each.find(f"{SVG}title") is not None
    ]
    assert [tip for _, _, tip in points] == [
        "a < b & c: 10",
        "a < b & c: 40",
        "a < b & c: 0",
        "other: 20",
    ]
    (x1, y10, _), (x4, y40, _), (x256, y0, _), (x16, y20, _) = points
    assert (x4 - x1, x16 - x1) == pytest.approx(((x256 - x1) / 4, (x256 - x1) / 2), abs=0.2)
    assert (y0 - y10, y0 - y20) == pytest.approx(((y0 - y40) / 4, (y0 - y40) / 2), abs=0.2)
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert {"tok/s & more", "clients", "1", "256", "a < b & c", "other"} <= set(words)


def test_a_single_point_has_a_place_too():
    root = ET.fromstring(line_chart("one", "clients", [Series("a", ((8, 0.0),))]))
    at = next(each for each in root.iter(f"{SVG}circle") if each.attrib["r"] == "3")
    width = float(root.attrib["viewBox"].split()[2])
    assert 0 < float(at.attrib["cx"]) < width


@pytest.mark.parametrize("points", [(), ((0.0, 1.0),)])
def test_what_cannot_be_drawn_is_an_error(points):
    with pytest.raises(ValueError, match="x above 0"):
        line_chart("none", "clients", [Series("a", points)])
