"""The torch-free engine: it decides what runs, in which blocks; it computes nothing."""
