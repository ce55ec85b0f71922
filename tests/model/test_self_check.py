"""Operators that are wrong in any one thing are found out at load, and plain ones take over."""

from __future__ import annotations

import logging

import pytest
import torch

from qwen3_asgi.model import qwen3
from qwen3_asgi.model.cpu.kernels import cpu_kernels
from qwen3_asgi.model.cuda.choosing import cuda_operators, unsupported
from qwen3_asgi.model.kv import LayerKV
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.self_check import TOLERANCE, Trial, difference, find_fault
from qwen3_asgi.model.shapes import named_shape

CPU = torch.device("cpu")
CONFIG = named_shape("Qwen3-0.6B")
SHAPE = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.rms_norm_eps)
PLAIN = TorchOperators(*SHAPE)
DTYPES = list(TOLERANCE)


class Wrong(TorchOperators):
    """The plain operators, but `name` gives what `change` makes of its result."""

    def __init__(self, name, change):
        super().__init__(*SHAPE)
        plain = getattr(self, name)
        setattr(self, name, lambda *arguments: change(plain(*arguments), *arguments))


class WrongAttention(TorchOperators):
    """Attention to which `change` happens afterwards, given its batch, pool and output."""

    def __init__(self, change):
        super().__init__(*SHAPE)
        self._change = change

    def attention(self, batch, cos, sin):
        attend = super().attention(batch, cos, sin)

        def run(fused, qk_norm, kv):
            out = attend(fused, qk_norm, kv)
            self._change(batch, kv, out)
            return out

        return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_operators_and_the_compiled_kernels_pass(dtype):
    assert find_fault(TorchOperators(*SHAPE), PLAIN, CONFIG, dtype, CPU) is None
    kernels = cpu_kernels(CONFIG, dtype)
    if kernels is not None:
        assert find_fault(kernels, PLAIN, CONFIG, dtype, CPU) is None


def one_off(out, *_):
    out[-1, -1] += 0.3
    return out


def not_added(out, x, delta, weight):
    x -= delta
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("norm", one_off),
        ("norm", lambda out, *_: out.float()),
        ("add_norm", lambda out, *_: out[:-1]),
        ("add_norm", not_added),
        ("silu_mul", lambda out, *_: out * float("nan")),
        ("silu_mul", lambda out, *_: -out),
    ],
)
def test_an_operator_that_is_wrong_is_named(name, change, dtype):
    if name == "norm" and dtype == torch.float32 and change is not one_off:
        change = one_off  # it is float32 already
    fault = find_fault(Wrong(name, change), PLAIN, CONFIG, dtype, CPU)
    assert fault is not None
    assert fault.startswith(f"{name}: ")


def missing_key(batch, kv, out):
    kv.keys[:, batch.slots[-1:]] = float("nan")


def wrong_value(batch, kv, out):
    kv.values[0, batch.slots[0], 0] += 1


def only_chunks(batch, kv, out):
    if len(batch.last_rows) < len(out):
        out[0] += 0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (missing_key, "attention of single tokens: "),
        (wrong_value, "attention of single tokens: "),
        (lambda batch, kv, out: out.zero_(), "attention of single tokens: "),
        (only_chunks, "attention of chunks: "),
    ],
)
def test_attention_that_is_wrong_is_named(change, named):
    fault = find_fault(WrongAttention(change), PLAIN, CONFIG, torch.bfloat16, CPU)
    assert fault is not None
    assert fault.startswith(named)


def test_slots_behind_a_sequence_are_never_good_to_read():
    """Who reads one position too many gets NaN, and is found out."""
    trial = Trial(CONFIG, torch.float32, CPU)

    class Reads(TorchOperators):
        def attention(self, batch, cos, sin):
            attend = super().attention(batch, cos, sin)

            def run(fused, qk_norm, kv):
                out = attend(fused, qk_norm, kv)
                return out + kv.keys[:, batch.slots[:1] + 1].sum() * 0

            return run

    wanted = trial.attention(PLAIN, [(5, 1)])
    found = trial.attention(Reads(*SHAPE), [(5, 1)])
    assert difference(wanted, trial.attention(PLAIN, [(5, 1)]), 0.0) is None
    assert "nan" in str(difference(found, wanted, 1.0))


def test_what_an_operator_raises_is_a_fault():
    def fail(*_):
        raise OSError("the compiler is gone")

    fault = find_fault(Wrong("silu_mul", fail), PLAIN, CONFIG, torch.float32, CPU)
    assert fault == "silu_mul: OSError: the compiler is gone"


def test_random_numbers_of_others_are_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    find_fault(PLAIN, PLAIN, CONFIG, torch.float32, CPU)
    assert torch.equal(torch.rand(4), wanted)


def chosen(kernels, monkeypatch):
    monkeypatch.setattr(qwen3, "cpu_kernels", lambda *_: kernels)
    return qwen3.choose_operators(CONFIG, torch.empty(0, dtype=torch.bfloat16))


def test_a_model_takes_plain_operators_in_place_of_wrong_ones(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "qwen3_asgi"):
        found = chosen(Wrong("silu_mul", lambda out, *_: -out), monkeypatch)
    assert type(found) is TorchOperators
    [record] = caplog.records
    assert "Wrong: not used" in record.getMessage()
    assert "(silu_mul: off by " in record.getMessage()


def test_a_model_takes_kernels_that_are_right(monkeypatch, caplog):
    right = TorchOperators(*SHAPE)
    with caplog.at_level(logging.WARNING, "qwen3_asgi"):
        assert chosen(right, monkeypatch) is right
    assert not caplog.records


def test_what_the_cuda_kernels_cannot_run_is_said(monkeypatch, caplog):
    import dataclasses

    from qwen3_asgi.model.cuda import choosing

    monkeypatch.setattr(choosing, "find_spec", lambda name: name)
    assert unsupported(CONFIG, torch.bfloat16) is None
    assert unsupported(CONFIG, torch.float64) == "dtype float64"
    for head_dim in (8, 80):
        odd = dataclasses.replace(CONFIG, head_dim=head_dim)
        assert unsupported(odd, torch.bfloat16) == f"head_dim {head_dim}"
    odd = dataclasses.replace(CONFIG, num_heads=12)
    assert unsupported(odd, torch.bfloat16) == "12 heads over 8 KV heads"
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "qwen3_asgi"):
        assert cuda_operators(CONFIG, torch.bfloat16) is None
    [record] = caplog.records
    assert "CUDA kernels: not used (triton is not installed)" in record.getMessage()


def test_layers_of_the_trial_are_as_the_pool_has_them():
    """Heads first in memory: a kernel that counts on it is tried on it."""
    seen = []

    def look(batch, kv, out):
        seen.append(kv)

    Trial(CONFIG, torch.float32, CPU, block_size=4).attention(WrongAttention(look), [(9, 1)])
    [kv] = seen
    assert isinstance(kv, LayerKV)
    assert kv.keys.shape == (CONFIG.num_kv_heads, 4 * 4, CONFIG.head_dim)
    assert kv.keys.is_contiguous()
