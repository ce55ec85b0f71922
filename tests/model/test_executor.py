from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest
import torch

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import memory
from qwen3_asgi.model.config import load_model_config
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.linear import Linear, PlainTable
from qwen3_asgi.scheduler.plan import RequestId, Row, SampleSpec, Sampling, StepPlan
from tests.model.checkpoints import VOCAB, edit_config, load, load_reference, write_checkpoint
from tests.model.driver import Driver, Sequence_

PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 63]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied")


@pytest.fixture(scope="module")
def executor(folder):
    return load(folder)


def row(name="a", tokens=PROMPT, start=0, blocks=(0, 1, 2), sampling=None):
    sample = None if sampling is None else SampleSpec(sampling, 0)
    return Row(RequestId(name), "prefill", tokens, start, blocks, sample)


def test_only_rows_that_sample_have_a_result(executor):
    greedy = Sampling(temperature=0.0)
    plan = StepPlan(0, (row("a"), row("b", blocks=(3, 4, 5), sampling=greedy)))
    assert set(executor.step(plan).tokens) == {"b"}
    assert executor.step(StepPlan(1, (row("a"),))).tokens == {}


def test_a_seeded_sample_survives_preemption(executor):
    sampling = Sampling(temperature=1.2, top_k=50, top_p=0.98, seed=4)
    driver = Driver(executor)
    whole = Sequence_("a", PROMPT, range(8), sampling=sampling)
    driver.run(whole, 16)
    resumed = Sequence_("b", PROMPT, range(8, 16), sampling=sampling)
    driver.run(resumed, 7)
    resumed.blocks, resumed.computed = [30, 28, 26, 24, 22, 20, 18], 0
    driver.run(resumed, 16, beside=[])
    assert resumed.output == whole.output


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(tokens=[3, VOCAB]), f"token id {VOCAB}"),
        (row(tokens=[3, -1]), "token id -1"),
        (row(tokens=[]), "no tokens"),
        (row(start=-1), "negative start"),
        (row(blocks=(0, 1)), "block table covers 8"),
        (row(blocks=(0, 1, 64)), "block id 64"),
        (row(blocks=(0, -1, 2)), "block id -1"),
        (row(tokens=[1], start=256, blocks=tuple(range(64)) * 2), "at most 256"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused(executor, bad, words):
    with pytest.raises(ValueError, match=words):
        executor.step(StepPlan(0, (bad,)))


def test_a_row_of_nan_is_an_error_of_that_request(folder):
    executor = load(folder)
    model, _ = executor._loaded
    weights = model._weights
    rows = weights.embedding.rows(torch.arange(weights.lm_head.shape[0]))
    with torch.inference_mode():
        rows[9] = float("nan")
    model._weights = replace(weights, embedding=PlainTable(rows), lm_head=Linear(rows))
    greedy = Sampling(temperature=0.0)
    batch = (row("bad", [9], blocks=(0,), sampling=greedy), row("b", [8], 0, (1,), greedy))
    result = executor.step(StepPlan(0, batch))
    # A tied embedding gives the NaN row's own token a NaN logit everywhere.
    assert set(result.errors) == {"bad", "b"}
    assert "NaN" in result.errors["bad"]


def test_dtypes(folder, tmp_path, caplog):
    assert load(folder).dtype == torch.float32
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    with caplog.at_level(logging.WARNING):
        assert load(folder, dtype="float16").dtype == torch.float32
    assert "float16 is slow" in caplog.text


def test_auto_dtype_is_the_checkpoints_unless_the_model_is_small(folder, monkeypatch):
    config = load_model_config(folder)
    assert memory.choose_dtype("auto", "bfloat16", config, "cpu") == torch.float32
    assert memory.choose_dtype("auto", "bfloat16", config, "cuda") == torch.bfloat16
    assert memory.choose_dtype("auto", "float16", config, "cuda") == torch.float16
    monkeypatch.setattr(memory, "SMALL_MODEL_PARAMETERS", 0)
    assert memory.choose_dtype("auto", "bfloat16", config, "cpu") == torch.bfloat16
    assert memory.choose_dtype("auto", "float16", config, "cpu") == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_close(folder, dtype):
    executor = load(folder, dtype=dtype)
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([PROMPT])).logits[0]
    found = executor.forward_logits([row()])
    assert found.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(found, expected, dim=1)
    assert float(similarity.min()) > 0.99
    chunked = torch.cat(
        (
            executor.forward_logits([row(tokens=PROMPT[:4], blocks=(7, 3, 5))]),
            executor.forward_logits([row(tokens=PROMPT[4:], start=4, blocks=(7, 3, 5))]),
        )
    )
    assert float(torch.nn.functional.cosine_similarity(chunked, found, dim=1).min()) > 0.99


def test_the_dtype_may_be_missing_from_the_config(tmp_path):
    folder = write_checkpoint(tmp_path, "tied")
    edit_config(folder, lambda raw: raw.pop("dtype"))
    assert load(folder).dtype == torch.float32


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", ""])
def test_an_unusable_device_is_named(folder, device):
    with pytest.raises(ModelLoadError, match=f"device {device!r}"):
        load(folder, device=device)


def test_context_is_the_smaller_of_both(folder):
    assert load(folder).max_context_tokens == 256
    assert load(folder, max_context_tokens=99).max_context_tokens == 99
    assert load(folder, max_context_tokens=9999).max_context_tokens == 256


def test_the_pool_holds_a_full_batch_if_memory_allows(folder, monkeypatch):
    config = load_model_config(folder)
    settings = EngineConfig(max_batch=3, block_size=16)
    assert memory.pool_blocks(config, settings, 250, torch.float32, "cpu") == 3 * 16
    block = 2 * 3 * 2 * 16 * 16 * 4
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 10 * block)
    assert memory.pool_blocks(config, settings, 250, torch.float32, "cpu") == 10
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
    monkeypatch.setattr(memory, "CPU_POOL_CAP_BYTES", 20 * block)
    assert memory.pool_blocks(config, settings, 250, torch.float32, "cpu") == 20
    assert memory.pool_blocks(config, settings, 640, torch.float32, "cpu") == 40
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * block - 1)
    with pytest.raises(ModelLoadError, match="no memory"):
        memory.pool_blocks(config, settings, 250, torch.float32, "cpu")
    chosen = EngineConfig(num_kv_blocks=7)
    assert memory.pool_blocks(config, chosen, 250, torch.float32, "cpu") == 7


def test_the_default_pool_is_allocated(folder):
    executor = load(folder, num_kv_blocks=None, max_batch=2, block_size=16)
    assert executor.num_kv_blocks == 2 * 16
    assert executor.block_size == 16


def test_available_memory_where_there_is_no_proc(monkeypatch):
    assert 2**20 < memory.available_bytes() < 2**50

    class NoProc:
        def __init__(self, path):
            pass

        def read_text(self):
            raise FileNotFoundError

    monkeypatch.setattr(memory, "Path", NoProc)
    assert memory.available_bytes() > 2**20
    original = os.sysconf

    def without_free_pages(name):
        if name == "SC_AVPHYS_PAGES":
            raise ValueError(name)
        return original(name)

    monkeypatch.setattr(os, "sysconf", without_free_pages)
    assert memory.available_bytes() > 2**20


def test_small_models_run_on_one_thread_and_others_leave_torch_alone(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    load(folder)
    load(folder, num_threads=2)
    assert asked == [1, 2]
    monkeypatch.setattr(memory, "SMALL_MODEL_PARAMETERS", 1)
    load(folder, dtype="float32")
    assert asked == [1, 2]


def test_progress_is_shown_on_a_terminal_only(folder, monkeypatch, capsys):
    load(folder)
    assert "loading weights" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(folder)
    assert capsys.readouterr().err.endswith("loading weights: layer 3 of 3\n")


def test_a_closed_executor_says_so(folder):
    executor = load(folder)
    executor.drop_request(RequestId("never seen"))
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.step(StepPlan(0, (row(),)))


def test_defaults_and_ids_of_the_end_are_read(folder):
    executor = load_executor(
        folder, EngineConfig(device="cpu", num_kv_blocks=4), owned_token_ids=range(10, 20)
    )
    assert executor.generation_defaults.eos_token_ids == (7,)
    greedy = Sampling(temperature=0.0)
    for start in range(4):
        step = StepPlan(0, (row(tokens=[start], blocks=(0,), sampling=greedy),))
        assert 10 <= executor.step(step).tokens[RequestId("a")].token_id < 20
