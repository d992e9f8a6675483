"""The engine-core process and its clients."""
