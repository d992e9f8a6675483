"""Writes the control flow around vector code: loops and branches that carry vectors along."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from worker.cpu.compiled.vector_code import VECTOR, Builder, Value


def size(number: int) -> Value:
    """Return a constant number of bytes or elements."""
    return ir.Constant(ir.IntType(64), number)


def starts(builder: Builder, base: Value, stride: Value, count: int, item: int) -> list[Value]:
    """Return the addresses of `count` rows that are `stride` elements of `item` bytes apart."""
    return [builder.add(base, builder.mul(stride, size(item * i))) for i in range(count)]


def either(
    builder: Builder, condition: Value, otherwise: list[Value], body: Callable[[], list[Value]]
) -> list[Value]:
    """Return what body gives where the condition holds, else `otherwise`."""
    before = builder.block
    inside = builder.append_basic_block("then")
    after = builder.append_basic_block("after")
    builder.cbranch(condition, inside, after)
    builder.position_at_end(inside)
    results = body()
    end = builder.block
    builder.branch(after)
    builder.position_at_end(after)
    merged = []
    for value, result in zip(otherwise, results, strict=True):
        phi = builder.phi(VECTOR)
        phi.add_incoming(value, before)
        phi.add_incoming(result, end)
        merged.append(phi)
    return merged


def loop(
    builder: Builder,
    count: Value,
    step: int,
    initial: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """Run body(k, carried) for k = 0, step, ... below count, which is positive."""
    before = builder.block
    block = builder.append_basic_block("loop")
    after = builder.append_basic_block("done")
    builder.branch(block)
    builder.position_at_end(block)
    k = builder.phi(count.type)
    k.add_incoming(size(0), before)
    carried = [builder.phi(VECTOR) for _ in initial]
    for phi, value in zip(carried, initial, strict=True):
        phi.add_incoming(value, before)
    results = body(k, list(carried))
    following = builder.add(k, size(step))
    k.add_incoming(following, block)
    for phi, value in zip(carried, results, strict=True):
        phi.add_incoming(value, block)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return results


def loop_over(builder: Builder, count: Value, step: int, body: Callable[[Value], None]) -> None:
    """Run body(k) for k = 0, step, ... below count, which is positive."""

    def round_of(k: Value, carried: list[Value]) -> list[Value]:
        body(k)
        return carried

    loop(builder, count, step, [], round_of)
