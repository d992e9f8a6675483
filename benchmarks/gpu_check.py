"""Checks the GPU path on one real GPU, in under five minutes.

    python -m benchmarks.gpu_check [--quick] [--json] [--model FOLDER]

Every kernel beside its reference; logits beside transformers, for a random model and a real one
(the demo model unless a folder is given); tokens in CUDA graphs beside eager ones; decode speed as
a share of the memory's; time to ready. The report is also written to
benchmarks/results/gpu_check.json. Exit codes: 0 all goals met, 1 one was missed, 3 no GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.demo_folder import demo_folder
from benchmarks.timing import Report, Row, flags, machine, show

RESULT = Path(__file__).parent / "results" / "gpu_check.json"
_NO_GPU = 3


def main() -> int:
    """Check and print; return the exit code."""
    parser = flags(__doc__ or "")
    parser.add_argument("--model", type=Path, help="folder of a real model (default: the demo)")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here, nothing was checked", file=sys.stderr)
        return _NO_GPU
    rows = list(_shown(_checks(options.model or demo_folder(), is_quick=options.quick)))
    properties = torch.cuda.get_device_properties(0)
    report = Report(
        claim="the GPU path computes what its references do, at the speed of the memory",
        machine=f"{properties.name}, {machine()}",
        settings={
            "torch": torch.__version__,
            "capability": f"{properties.major}.{properties.minor}",
        },
        rows=rows,
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    show(report, as_json=options.json)
    return 1 if any(row.met is False for row in rows) else 0


def _shown(rows: Iterator[Row]) -> Iterator[Row]:
    """Name each row as it comes: a run that dies tells how far it got."""
    for row in rows:
        print(f"{'MISSED ' if row.met is False else ''}{row.name}", file=sys.stderr, flush=True)
        yield row


def _checks(folder: Path, *, is_quick: bool) -> Iterator[Row]:
    import torch

    from benchmarks.gpu_kernels import GPU, SHAPES, KernelCheck
    from benchmarks.gpu_model import ModelCheck
    from worker.gpu.device import CudaDevice

    device = CudaDevice()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check = KernelCheck(
            device.torch_device,
            dtype,
            GPU,
            num_processors=device.num_processors,
            action_us=_action_us,
        )
        yield from check.rows(SHAPES[:2] if is_quick else SHAPES)
    bandwidth = _bandwidth()
    yield Row(name="memory, read and written by a copy", ours=bandwidth / 1e9, unit="GB/s")
    with tempfile.TemporaryDirectory() as temporary:
        random_model = ModelCheck(
            _random_model(Path(temporary) / "random"), device, name="random Llama"
        )
        real_model = ModelCheck(folder, device, name=folder.name)
        for model in (random_model, real_model):
            for dtype in (torch.float32, torch.bfloat16):
                yield from model.logits(dtype)
            yield from model.graphs("bfloat16")
        yield from real_model.readiness(Path(temporary) / "profiles")
        yield from real_model.throughput(
            (1, 16) if is_quick else (1, 16, 64, 256), bandwidth=bandwidth, num_tokens=128
        )


def _action_us(action: Callable[[], object]) -> float:
    """Return the median microseconds of an action on the device, without those of its launch."""
    import torch

    new_event: Callable[..., Any] = torch.cuda.Event
    action()
    samples: list[float] = []
    for _ in range(5):
        start, end = (new_event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            action()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / 20)
    return statistics.median(samples)


def _bandwidth() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    import torch

    source = torch.zeros(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (_action_us(lambda: target.copy_(source)) * 1e-6)


def _random_model(folder: Path) -> Path:
    """Write a small random Llama whose heads are those of large ones."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        initializer_range=0.05,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
