"""Property tests of this folder measure results, not time: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("text", deadline=None)
settings.load_profile("text")
