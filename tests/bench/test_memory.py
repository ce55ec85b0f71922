"""`bench memory` in a fresh process: parts add up, and the pool and the weights are taken off."""

from __future__ import annotations

import json

import pytest

from qwen3_asgi.bench.memory import MIB, STAGES, _stages
from qwen3_asgi.bench.processes import PROC, memory_bytes
from qwen3_asgi.cli import main
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PROC.exists(), reason="memory is read from /proc"),
]

SMALL = ["--device", "cpu", "--requests", "3", "--prompt-tokens", "64", "--output-tokens", "4"]


def measure(capsys, *arguments):
    assert main(["bench", "memory", *SMALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_parts_sum_to_what_is_beside_weights_and_pool(capsys):
    small = measure(capsys, "--num-kv-blocks", "64")
    large = measure(capsys, "--num-kv-blocks", "2112")
    block = 2 * 5 * 4 * 32 * 16 * 4  # keys and values, layers, heads, width, tokens, float32
    assert (small["kv_pool"], large["kv_pool"]) == (64 * block, 2112 * block)
    for report in (small, large):
        assert list(report["stages"]) == list(STAGES)
        assert sum(report["stages"].values()) == report["beside"]
        known = report["weights"] + report["kv_pool"]
        assert report["resident"] == report["beside"] + known
        assert report["peak"] >= report["resident"]
        assert report["stages"]["torch"] > 50 * MIB
        assert report["weights"] == 2_595_200 * 4
        assert report["tied_copy"] == 0  # nothing is packed in float32
        assert report["beside_copies"] == report["beside"]
    # 160 MiB more of pool are in memory, and none of it is left on the account.
    assert large["resident"] - small["resident"] > 140 * MIB
    assert abs(large["beside"] - small["beside"]) < 20 * MIB


def test_the_bundled_model_keeps_within_the_limit(capsys):
    assert measure(capsys)["beside"] < 600 * MIB


def test_a_packed_embedding_is_counted_apart():
    from dataclasses import replace
    from types import SimpleNamespace

    from qwen3_asgi.model.footprint import footprint

    config = EngineConfig(device="cpu", dtype="bfloat16", num_kv_blocks=4)
    executor = load_model("tiny", config).executor
    model = executor._open()[0]
    for packed, expected in ((True, 1984 * 192 * 2), (False, 0)):
        model._weights = replace(model._weights, lm_head=SimpleNamespace(is_packed=packed))
        found = footprint(executor)
        assert (found.weights, found.tied_copy) == (2_595_200 * 2, expected)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        footprint(executor)


def test_a_table_for_a_person(capsys):
    assert main(["bench", "memory", *SMALL, "--num-kv-blocks", "64"]) == 0
    out = capsys.readouterr().out
    for words in ("memory of a process with tiny", "tokenizer", "beside weights, their copy"):
        assert words in out


def test_a_process_that_fails_is_one_clear_line(capfd, tmp_path):
    assert main(["bench", "memory", "--model", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert "did not get to its end" in error
    assert "config.json" in error


def test_nothing_to_measure_is_one_clear_line(capsys):
    assert main(["bench", "memory", "--prompt-tokens", "0"]) == 1
    assert "--prompt-tokens must be at least 1, got 0" in capsys.readouterr().err


def test_a_stage_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match="told of the stages"):
        _stages([("interpreter", 1)], {})


def test_memory_is_that_of_this_process():
    before, _ = memory_bytes()
    held = b"x" * (64 * MIB)
    after, most = memory_bytes()
    assert after - before > 50 * MIB
    assert most >= after
    del held
