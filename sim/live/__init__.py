"""Live fleets beside replays: the only part of `sim` that speaks HTTP."""
