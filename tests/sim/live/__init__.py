"""Tests of `sim.live`: prompts, fits and comparisons by hand, and replays of real fleets."""
