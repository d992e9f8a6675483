"""What is particular to running on CPUs."""
