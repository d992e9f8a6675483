"""What is particular to running on a CUDA device."""
