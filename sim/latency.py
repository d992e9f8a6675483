"""What a step of an engine costs, in seconds: a small linear model, and where its figures are from.

Prefill is arithmetic, decode is memory traffic, and every step has a floor: reading the weights
and launching. Profiles of common GPUs are estimates from data sheets; a file written by
`prefixfleet replay calibrate` is measured. It knows no scheduler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError

NonNegative = Annotated[float, msgspec.Meta(ge=0)]

_ATTAINED_COMPUTE = 0.5
_ATTAINED_BANDWIDTH = 0.7
_LAUNCH_S = 0.001
_TYPICAL_CONTEXT = 2000


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """step = base + prefill tokens * a + prefill pairs * q + decodes * b + decode context * k.

    A pair is one new token that reads one earlier token; the context of a decode is what it
    reads. `calibrated` False: results are comparable with each other only. `outside_s` is what a
    request takes outside of the engine before its first token, over HTTP; it is no part of a step.
    """

    name: str
    calibrated: bool = False
    source: str = ""
    base_s: NonNegative = 0.0
    per_prefill_token_s: NonNegative = 0.0
    per_prefill_pair_s: NonNegative = 0.0
    per_decode_s: NonNegative = 0.0
    per_context_token_s: NonNegative = 0.0
    outside_s: NonNegative = 0.0

    def step_s(
        self, *, prefill_tokens: int, prefill_pairs: int, decodes: int, context: int
    ) -> float:
        """Return the seconds of one step."""
        return (
            self.base_s
            + prefill_tokens * self.per_prefill_token_s
            + prefill_pairs * self.per_prefill_pair_s
            + decodes * self.per_decode_s
            + context * self.per_context_token_s
        )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed of a long prefill step, reading half of a typical context; 0 when free."""
        per_token = self.per_prefill_token_s + _TYPICAL_CONTEXT / 2 * self.per_prefill_pair_s
        return 1.0 / per_token if per_token else 0.0


class _Gpu(msgspec.Struct, frozen=True):
    """Data sheet: dense bf16 FLOP/s and bytes/s."""

    flops: float
    bytes_per_s: float


class _Model(msgspec.Struct, frozen=True):
    """Parameters, layers, hidden size, bytes of KV per token (bf16), and GPUs that share it."""

    parameters: float
    layers: int
    hidden: int
    kv_bytes: int
    gpus: int = 1


_GPUS = {
    "h200": _Gpu(989e12, 4.8e12),
    "h100": _Gpu(989e12, 3.35e12),
    "a100": _Gpu(312e12, 2.04e12),
    "l40s": _Gpu(362e12, 0.864e12),
    "a10g": _Gpu(70e12, 0.6e12),
    "l4": _Gpu(121e12, 0.3e12),
}
_MODELS = {
    "8b": _Model(8.0e9, 32, 4096, 131_072),
    "32b": _Model(32.8e9, 64, 5120, 262_144, gpus=2),
    "70b": _Model(70.6e9, 80, 8192, 327_680, gpus=4),
}
PROFILES = tuple(f"{gpu}-{model}" for gpu in _GPUS for model in _MODELS)


def load_latency(name: str) -> LatencyModel:
    """Return a profile by name, or the model in a JSON file; raise ConfigError for neither."""
    if name in PROFILES:
        gpu, _, model = name.partition("-")
        return _estimate(name, _GPUS[gpu], _MODELS[model])
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(
            f"latency {name!r}: no such profile{nearest(name, PROFILES)}, or a .json file of "
            "`prefixfleet replay calibrate`"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=LatencyModel)
    except OSError as error:
        raise ConfigError(f"latency {name}: {error.strerror}") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"latency {name}: {error}") from None


def _estimate(name: str, gpu: _Gpu, model: _Model) -> LatencyModel:
    """Derive a profile from data sheets: half the arithmetic, 70 % of the bandwidth attained."""
    flops = gpu.flops * model.gpus * _ATTAINED_COMPUTE
    bytes_per_s = gpu.bytes_per_s * model.gpus * _ATTAINED_BANDWIDTH
    return LatencyModel(
        name=name,
        source="estimate from data sheets, bf16",
        base_s=_LAUNCH_S + 2 * model.parameters / bytes_per_s,
        per_prefill_token_s=2 * model.parameters / flops,
        per_prefill_pair_s=4 * model.hidden * model.layers / flops,
        per_decode_s=2 * model.parameters / flops,
        per_context_token_s=model.kv_bytes / bytes_per_s,
    )
