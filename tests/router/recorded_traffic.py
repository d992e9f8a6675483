"""Conversations through a gateway that records: the traffic that dry runs are tried on."""

from __future__ import annotations

from tests.conditions import until
from tests.router.running_gateway import Running, completion

DRY_RUN = "/admin/tenants/acme/policy/dry-run"
NUM_TURNS, NUM_SESSIONS = 6, 4


async def converse(running: Running) -> None:
    """Send conversations whose turns begin with all that was said before."""
    for turn in range(NUM_TURNS):
        for session in range(NUM_SESSIONS):
            prompt = [session + 1] * (32 * (turn + 1))
            status, _, _ = await running.post("/v1/completions", completion(prompt, max_tokens=2))
            assert status == 200


async def recorded(running: Running, num_rows: int = NUM_TURNS * NUM_SESSIONS) -> None:
    """Wait for so many rows in the record."""
    recorder = running.gateway.recorder
    assert recorder is not None
    await until(lambda: recorder.num_rows == num_rows)
