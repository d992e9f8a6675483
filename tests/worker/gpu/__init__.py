"""Tests of the kernels and of the GPU path, on CPU tensors in Triton's interpreter."""
