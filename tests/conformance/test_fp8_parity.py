"""transformers reads a checkpoint in float8 blocks: the same logits, in float32."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch
from transformers import FineGrainedFP8Config, Qwen3ForCausalLM

from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import VOCAB, load, reference_logits
from tests.model.fp8_files import write_pair

TOKENS = random.Random(5).choices(range(VOCAB), k=21)

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers needs accelerate to read float8"
)


# Not "ragged": transformers takes the size of a block to be the matrix's over the number of blocks.
@pytest.mark.parametrize("kind", ["tied", "untied_sharded"])
@pytest.mark.parametrize("size", ["one_block", "even"])
def test_logits_are_those_of_transformers(size, kind, tmp_path):
    folder = write_pair(tmp_path, size, kind).fp8
    model = Qwen3ForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    expected = reference_logits(model.eval(), TOKENS)
    row = Row(RequestId("a"), "prefill", TOKENS, 0, range(6), None)
    found = load(folder, dtype="float32").forward_logits([row])
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * largest)
