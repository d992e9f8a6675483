"""The life of one request, one step per file."""
