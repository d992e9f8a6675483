"""Which LoRA adapter a model name stands for, fleet-wide: one folder and one content per name.

Replicas are free to load what they like; a name that means two things would hash prompts wrongly
for one of them. So the oldest replica that has a name says what it means, and one that means
something else by it does not serve that name here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvindex.registry import ReplicaRecord, ServedAdapter


def pinned_adapters(records: Iterable[ReplicaRecord]) -> dict[str, ServedAdapter]:
    """Return what each adapter's name stands for; names of models stand for the models alone."""
    pins: dict[str, ServedAdapter] = {}
    models: set[str] = set()
    for record in sorted(records, key=lambda record: (record.epoch, record.id)):
        models.update(record.served_models)
        for adapter in record.adapters:
            pins.setdefault(adapter.name, adapter)
    return {name: adapter for name, adapter in pins.items() if name not in models}


def served_names(record: ReplicaRecord, pins: Mapping[str, ServedAdapter]) -> tuple[str, ...]:
    """Return every name that a replica serves here: its models, and the adapters that fit."""
    fitting = (one.name for one in record.adapters if pins.get(one.name) == one)
    return (*record.served_models, *fitting)
