"""One script per claim of speed."""
