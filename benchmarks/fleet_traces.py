"""The workloads of bench_fleet.py as traces of token ids, for `prefixfleet replay run`.

    python -m benchmarks.fleet_traces FOLDER [--requests N] [--rate R] [--seed S] [--model MODEL]

Beside them it writes `latency.json`, what a step of the scripted replicas costs. A policy that is
tried on these in the simulator takes seconds; the live benchmark takes half an hour.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import msgspec

from benchmarks.demo_folder import demo_folder
from benchmarks.fleet_workloads import STEP_COST, WORKLOADS, Arrival
from engine.frontend.parse import parse_chat_request
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import load_bundle
from kvindex.foundation.clock import SystemClock
from sim.latency import LatencyModel

_MAX_MODEL_LEN = 8192


def row(encoder: PromptEncoder, arrival: Arrival, *, rate: float) -> bytes:
    """Return one line: the prompt as the gateway tokenizes it, and its instant in milliseconds."""
    body = {"model": "any", "messages": arrival.messages}
    tokens = encoder.chat(parse_chat_request(msgspec.json.encode(body)), scope="")
    return msgspec.json.encode(
        {
            "timestamp": arrival.at_s / rate * 1000,
            "token_ids": tokens,
            "output_length": arrival.max_tokens,
        }
    )


def main() -> None:
    """Write the files and name them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=40.0, help="requests/s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="folder with the tokenizer (the demo model's)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bundle = load_bundle(options.model or demo_folder())
    encoder = PromptEncoder(bundle, clock=SystemClock(), max_model_len=_MAX_MODEL_LEN)
    for name, workload in WORKLOADS.items():
        arrivals = workload(random.Random(f"{options.seed} {name}"), options.requests)
        file = options.folder / f"{name.replace(' ', '-')}.jsonl"
        file.write_bytes(b"".join(row(encoder, a, rate=options.rate) + b"\n" for a in arrivals))
        print(file)
    latency = msgspec.convert(
        {"name": "scripted replicas", "calibrated": True, **STEP_COST}, LatencyModel
    )
    (options.folder / "latency.json").write_bytes(msgspec.json.encode(latency))


if __name__ == "__main__":
    main()
