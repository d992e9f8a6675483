"""The shape of a Mamba-2 mixer as a config.json gives it, and what its state weighs; torch-free.

It knows neither the layers around a mixer nor its weights.
"""

from __future__ import annotations

import msgspec

from kvindex.foundation.errors import ConfigError
from worker.model.config_fields import ConfigFields

STATE_ITEM_BYTES = 4
"""A number of the scan's state: float32, whatever the precision of the model."""

_NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Bounds of a step that bound nothing, in both spellings."""


class MambaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A state-space mixer (Dao and Gu 2024) of heads with a state [head_dim, state_size] each.

    Heads of a group write to their states and read from them with the same vectors. `kernel`: how
    many inputs the convolution before the scan reads.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    has_conv_bias: bool

    @property
    def inner_size(self) -> int:
        """Columns of the scan's input and output."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """What the convolution reads: the scan's input, and both vectors of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def projected_size(self) -> int:
        """Columns of the first product: a gate, what the convolution reads, a step per head."""
        return self.inner_size + self.num_channels + self.num_heads

    @property
    def num_state_items(self) -> int:
        """Numbers in the state of the scan."""
        return self.inner_size * self.state_size

    def conv_bytes(self, itemsize: int) -> int:
        """Return what the inputs of the convolution take, in whole numbers of the scan's state."""
        num_bytes = (self.kernel - 1) * self.num_channels * itemsize
        return -(-num_bytes // STATE_ITEM_BYTES) * STATE_ITEM_BYTES

    def state_bytes(self, itemsize: int) -> int:
        """Return what one layer keeps, in a place of two equal halves, of a model so precise.

        The convolution's inputs lie in the first half, the state of the scan behind them.
        """
        conv = self.conv_bytes(itemsize)
        return max(2 * conv, conv + STATE_ITEM_BYTES * self.num_state_items)


def read_mamba(fields: ConfigFields) -> MambaConfig:
    """Read the `mamba_*` fields; ConfigError where they do not fit or ask for something else."""
    fields.refuse_unless("mamba_proj_bias", False)
    fields.refuse_unless("time_step_limit", *_NO_LIMIT)
    num_heads = fields.integer("mamba_n_heads", 128)
    inner_size = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    head_dim = inner_size // num_heads
    if fields.raw.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.integer("mamba_d_head")
    config = MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        num_groups=fields.integer("mamba_n_groups", 1),
        kernel=fields.integer("mamba_d_conv", 4),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
    )
    if config.inner_size != inner_size or num_heads % config.num_groups:
        raise ConfigError(
            f"{fields.path}: mamba_n_heads={num_heads} heads of mamba_d_head={head_dim} in "
            f"mamba_n_groups={config.num_groups} do not make mamba_expand * hidden_size="
            f"{inner_size}"
        )
    return config
