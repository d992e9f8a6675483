"""What each kernel computes, in plain torch on any device: the truth that they are tested against.

Written for clarity, in float32 with one rounding at the end; the paged ones walk requests in
Python. Signatures are those of the kernels.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store keys and values at their slots, those of the null block excepted."""
    block_size = key_cache.shape[1]
    real = slots >= block_size
    key_cache.flatten(0, 1)[slots[real]] = key[real]
    value_cache.flatten(0, 1)[slots[real]] = value[real]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add to the residual in place and return the norm of the rounded sum."""
    residual.copy_((x.float() + residual.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)


def rotate(
    qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, num_rotated: int
) -> None:
    """Rotate the first heads in place."""
    cos, sin = table[:, positions, None, :]
    low, high = qkv[:, :num_rotated].float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    qkv[:, :num_rotated] = rotated.to(qkv.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend every request's queries causally; the reference of prefill and of decode."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    for i, context in enumerate(context_lens.tolist()):
        start, end = query_start[i : i + 2].tolist()
        if start == end:
            continue
        position = torch.arange(context, device=query.device)
        slots = block_tables[i, position // block_size].long() * block_size + position % block_size
        k = key_cache.flatten(0, 1)[slots].float()
        v = value_cache.flatten(0, 1)[slots].float()
        q = query[start:end].float().view(end - start, num_kv_heads, -1, query.shape[-1])
        score = torch.einsum("qkgd,nkd->kgqn", q, k) * query.shape[-1] ** -0.5
        asking = torch.arange(context - (end - start), context, device=query.device)
        score = score.masked_fill(position > asking[:, None], -torch.inf)
        attended = torch.einsum("kgqn,nkd->qkgd", score.softmax(dim=-1), v)
        out[start:end] = attended.flatten(1, 2).to(out.dtype)
