"""Runs Qwen3: a `StepPlan` in, tokens out. torch lives in this package and nowhere else."""
