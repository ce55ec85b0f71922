"""`bench growth`: every point that fits, each with its cost, in a table and a chart."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from qwen3_asgi.cli import main
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model

pytestmark = pytest.mark.torch

SVG = "{http://www.w3.org/2000/svg}"
# 16 blocks are 256 tokens: 3 clients at 100 tokens need 21 blocks.
GRID = ["-n", "1", "3", "--context", "20", "100", "--num-kv-blocks", "16", "--steps", "2"]


def test_what_fits_is_measured_and_what_does_not_is_told(capsys, tmp_path):
    svg = tmp_path / "growth.svg"
    arguments = ["--device", "cpu", *GRID, "--svg", str(svg), "--json"]
    assert main(["bench", "growth", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    points = report["points"]
    assert [(each["clients"], each["context"]) for each in points] == [(1, 20), (1, 100), (3, 20)]
    for each in points:
        step = each["model_ms"] + each["scheduling_ms"]
        assert min(each["model_ms"], each["scheduling_ms"], each["floor_ms"]) > 0
        assert each["tokens_per_second"] == pytest.approx(each["clients"] / step * 1000, abs=0.01)
    assert report["skipped"] == [
        {"clients": 3, "context": 100, "reason": "more than the 256 tokens of the KV pool"}
    ]
    assert report["kv_tokens"] == 256
    root = ET.parse(svg).getroot()
    tips = [each.text for each in root.iter(f"{SVG}title")]
    assert tips == [
        f"context {context}: {speed:g}"
        for context, speed in (
            (20, points[0]["tokens_per_second"]),
            (20, points[2]["tokens_per_second"]),
            (100, points[1]["tokens_per_second"]),
        )
    ]


def test_a_table_for_a_person(capsys):
    assert main(["bench", "growth", "--device", "cpu", *GRID, "--context", "20", "9999"]) == 0
    out = capsys.readouterr().out
    for words in (
        "clients \\ context",
        "9,999",
        "longer than the 4,096 tokens",
        "without a server",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "--clients must be at least 1, got 0"),
        (["--context", "-5"], "--context must be at least 1, got -5"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--context", "4000"], "no point fits: more than the 256 tokens of the KV pool"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, words, capsys):
    assert main(["bench", "growth", "--device", "cpu", *GRID, *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_whole_pool_is_made_up_and_rows_share_nothing():
    from qwen3_asgi.model.executor import TorchExecutor
    from qwen3_asgi.model.footprint import touch_pool
    from qwen3_asgi.model.stepping import Bench

    executor = load_model("tiny", EngineConfig(device="cpu", num_kv_blocks=12)).executor
    assert isinstance(executor, TorchExecutor)
    _, pool = executor._open()
    touch_pool(executor)
    bench = Bench(executor)
    bench.make_up_kv()
    for layer in pool.layers:
        for cache in layer:
            assert 0.9 < cache.std() < 1.1
            assert cache.unique().numel() > cache.numel() * 0.9
    before = pool.layers[0].keys.clone()
    assert len(bench.decode_made_up(3, 50, 2)) == 2
    changed = (pool.layers[0].keys != before).any(dim=0).any(dim=1).nonzero().flatten().tolist()
    # Each of the three writes the position of its own token, in the last of its four blocks.
    assert changed == [49, 64 + 49, 128 + 49]
    executor.close()
