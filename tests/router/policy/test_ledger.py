"""What a gateway counts as running at a target."""

from __future__ import annotations

import random

from kvindex.index import Target
from router.policy.ledger import Entry, Ledger

TARGET = Target("r")


def chains(count: int, *, seed: int) -> list[tuple[bytes, ...]]:
    """Return prompts that share starts; a block's name stands for its whole prefix."""
    source = random.Random(seed)
    made: list[tuple[bytes, ...]] = [()]
    for number in range(count):
        start = source.choice(made)
        kept = start[: source.randint(0, len(start))]
        made.append((*kept, *(b"%d-%d" % (number, i) for i in range(source.randint(1, 9)))))
    return made[1:]


def entry(hashes: tuple[bytes, ...]) -> Entry:
    return Entry(TARGET, prefill_tokens=7, hashes=hashes, probe=False, placed_at=0.0, block_size=16)


def test_leading_running_blocks_are_those_that_a_walk_along_the_chain_counts() -> None:
    prompts = chains(60, seed=3)
    ledger, running = Ledger(), set[bytes]()
    for number, hashes in enumerate(prompts[::2]):
        ledger.open((str(number), 1), entry(hashes))
        running.update(hashes)
    for hashes in (*prompts, (), (b"new",), (*prompts[0], b"new")):
        walked = 0
        while walked < len(hashes) and hashes[walked] in running:
            walked += 1
        assert ledger.account(TARGET).num_running_blocks(hashes) == walked


def test_nothing_is_left_when_every_request_has_ended() -> None:
    ledger = Ledger()
    for number, hashes in enumerate(chains(40, seed=4)):
        ledger.open((str(number), 1), entry(hashes))
    for number in reversed(range(40)):
        assert ledger.close((str(number), 1)) is not None
        assert ledger.close((str(number), 1)) is None
    account = ledger.account(TARGET)
    assert (account.num_active, account.prefill_tokens, account.num_held_tokens) == (0, 0, 0)
    assert not account.block_refs
