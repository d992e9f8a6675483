"""The forward pass of a small batch or a long prompt, compiled for this CPU at first use."""
