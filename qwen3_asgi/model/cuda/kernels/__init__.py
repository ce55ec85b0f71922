"""Triton kernels alone; the typed functions that launch them are one folder up."""
