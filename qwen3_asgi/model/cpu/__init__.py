"""Kernels for the CPU: a small C++ source, compiled on first use where there is a compiler."""
