"""Host memory and the file, over many random lives."""

from __future__ import annotations

import pytest

from tests.scheduler.tier_life import OPERATIONS, tier_life

LIVES = 10_000 // OPERATIONS


@pytest.mark.usefixtures("quiet")
def test_ten_thousand_operations_lose_and_mix_up_nothing() -> None:
    copied = {"host": 0, "file": 0, "device": 0}
    for seed in range(LIVES):
        for copy in tier_life(seed).tiers.copied:
            copied[copy.target.level] += 1
    assert min(copied.values()) > 100, f"the lives must use all levels: {copied}"
