"""One module per way to write a trace."""
