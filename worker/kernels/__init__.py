"""Triton kernels of the GPU path, each with a reference in plain torch (reference.py)."""
