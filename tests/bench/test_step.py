"""`bench step` on the bundled model: parts add up, and a split executor is whole again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from qwen3_asgi.bench import llama_cpp, llama_cpp_child
from qwen3_asgi.bench.step import PARTS
from qwen3_asgi.bench.step_scheduling import scheduling_seconds
from qwen3_asgi.cli import main
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model
from qwen3_asgi.scheduler.plan import RequestId, Row, SampleSpec, Sampling, StepPlan

pytestmark = pytest.mark.torch

SMALL = [
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--batch",
    "1",
    "3",
    "--context",
    "20",
    "--steps",
    "2",
]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("qwen3_asgi.model.stepping.SETTLE_SECONDS", 0.0)
    # The machine's limits are of no interest here.
    monkeypatch.setattr("qwen3_asgi.model.probes.PROBE_SECONDS", 0.0)
    monkeypatch.setattr("qwen3_asgi.model.probes.READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("qwen3_asgi.model.probes.GEMM_WIDTH", {"cpu": 256})


def test_parts_sum_to_the_step(capsys):
    assert main(["bench", "step", *SMALL, "--chunk", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_per_second"] > 0
    assert report["flops_per_second"] > 0
    decode = [each for each in report["points"] if each["kind"] == "decode"]
    assert [(each["batch"], each["tokens"]) for each in decode] == [(1, 20), (3, 20)]
    for each in decode:
        assert tuple(each["parts"]) == PARTS
        assert all(part > 0 for part in each["parts"].values())
        assert sum(each["parts"].values()) == pytest.approx(each["step_ms"])
        added = each["parts"]["scheduling"] + each["parts"]["delivery"]
        assert each["model_ms"] + added == pytest.approx(each["step_ms"])
        assert each["of_floor"] == pytest.approx(each["floor_ms"] / each["model_ms"], abs=1e-3)
        assert each["tokens_per_second"] == pytest.approx(
            each["batch"] / each["step_ms"] * 1000, abs=0.01
        )
        assert each["ratios"] == {}
    (prefill,) = (each for each in report["points"] if each["kind"] == "prefill")
    assert (prefill["tokens"], prefill["parts"]) == (16, {})


def test_transformers_is_compared_in_turn(capsys):
    assert main(["bench", "step", *SMALL, "--chunk", "16", "--compare-transformers", "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["points"]:
        assert each["peer_ms"]["transformers"] > 0
        # The median of pairs, which lies between the extremes of both.
        assert each["ratios"]["transformers"] > 0


def test_the_same_engine_is_compared_with_itself_in_another_configuration(capsys):
    other = json.dumps({"quantization": "int8"})
    assert main(["bench", "step", *SMALL, "--chunk", "16", "--compare-config", other]) == 0
    assert "quantization=int8" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"speed": 9}'])
def test_a_configuration_that_is_none_is_one_clear_line(text, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "step", *SMALL, "--compare-config", text])
    assert "--compare-config" in capsys.readouterr().err


def test_llama_cpp_that_is_not_there_is_one_clear_line(capsys, monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    assert main(["bench", "step", *SMALL, "--compare-llama-cpp", "x.gguf"]) == 1
    assert "llama-cpp-python" in capsys.readouterr().err


class FakeModel:
    """The child's model, without llama.cpp: each answer is a time of its own."""

    def __init__(self, path, threads):
        self.said = []

    def fill(self, batch, context):
        return batch + context / 1000

    def decode(self):
        return 0.5

    def prefill(self, tokens):
        return tokens / 10


def test_the_child_answers_each_line_with_its_time(monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp_child, "Model", FakeModel)
    monkeypatch.setattr("sys.argv", ["child", "x.gguf", "2"])
    monkeypatch.setattr("sys.stdin", io.StringIO('["fill", 3, 19]\n["decode"]\n["prefill", 16]\n'))
    llama_cpp_child.main()
    said = [json.loads(line)["seconds"] for line in capsys.readouterr().out.splitlines()]
    assert said == [0.0, 3.019, 0.5, 1.6]


def test_llama_cpp_is_compared_in_turn(capsys, tmp_path):
    """The whole way, where llama-cpp-python has been built."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    assert main(["bench", "make-model", "tiny", str(folder), "--gguf", str(file)]) == 0
    capsys.readouterr()
    arguments = [*SMALL, "--chunk", "16", "--compare-llama-cpp", str(file), "--json"]
    arguments[1] = str(folder)
    assert main(["bench", "step", *arguments]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert all(each["ratios"]["llama.cpp"] > 0 for each in points)


def test_a_table_for_a_person(capsys):
    assert main(["bench", "step", *SMALL, "--chunk", "16"]) == 0
    out = capsys.readouterr().out
    for words in ("measured limits", "decode: batch, context", "delivery", "prefill: tokens"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch 0 is too small"),
        (["--context", "999999"], "tiny holds at most"),
    ],
)
def test_points_that_cannot_be_are_one_clear_line(arguments, words, capsys):
    assert main(["bench", "step", *SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_stopwatches_change_no_token_and_leave_nothing():
    from qwen3_asgi.model.executor import TorchExecutor
    from qwen3_asgi.model.splitting import PARTS as MODEL_PARTS
    from qwen3_asgi.model.splitting import split

    executor = load_model("tiny", EngineConfig(device="cpu", num_kv_blocks=4)).executor
    assert isinstance(executor, TorchExecutor)
    spec = SampleSpec(Sampling(temperature=0.0, logprobs=2), 0)
    plan = StepPlan(1, (Row(RequestId("r"), "prefill", [5, 6, 7], 0, [0], spec),))
    before = executor.step(plan)
    with split(executor) as watches:
        assert executor.step(plan) == before
        taken = watches.take()
        assert tuple(taken) == MODEL_PARTS
        assert all(seconds > 0 for seconds in taken.values())
        assert set(watches.take().values()) == {0.0}
    assert executor.step(plan) == before
    assert set(watches.take().values()) == {0.0}
    executor.close()


def test_transformers_has_the_same_weights():
    import torch

    from qwen3_asgi.model.executor import TorchExecutor
    from qwen3_asgi.model.plain_loop import PlainLoop
    from qwen3_asgi.tiny import tiny_path

    executor = load_model("tiny", EngineConfig(device="cpu", num_kv_blocks=4)).executor
    assert isinstance(executor, TorchExecutor)
    prompt = [5, 60, 7, 80, 9]
    peer = PlainLoop(executor.model_config, Path(tiny_path()), executor.dtype, executor.device)
    row = Row(RequestId("r"), "prefill", prompt, 0, [0], None)
    ours = executor.forward_logits([row])
    with torch.inference_mode():
        theirs = peer.model(torch.tensor([prompt])).logits[0].float()
    assert torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2)
    executor.close()


@pytest.mark.parametrize(("batch", "context"), [(1, 8), (64, 33)])
def test_scheduling_is_timed_with_every_request_decoding(batch, context):
    # It raises when a request does not decode.
    assert all(seconds > 0 for seconds in scheduling_seconds(batch, context))
