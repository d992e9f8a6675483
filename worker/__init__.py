"""The processes and the arithmetic of one replica."""
