"""What every package needs and that needs nothing of ours."""
