"""Sleep: an engine gives its memory back for a while, and keeps its requests.

The prefix cache is emptied first, so nothing that is found later has lost its KV. Level 1 gives
back the memory of the KV cache, level 2 that of the weights too. Requests wait and go on when it
wakes, computed again. Other weights are loaded the same way: asleep.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from engine.executor import Executor, ExecutorInfo
from engine.messages import SleepLevel
from kvindex.foundation.errors import ConfigError, PrefixFleetError

SHRUNK_BLOCKS = 1
"""What is left of a sleeping pool: the null block."""


@runtime_checkable
class ReloadableExecutor(Executor, Protocol):
    """An executor that can do without its weights for a while, or get others."""

    def unload(self) -> None:
        """Give back weights and KV cache; nothing is in flight. Only `reload` may follow."""
        ...

    def reload(self, model_folder: str | None = None) -> None:
        """Load weights again, those of another folder if one is given; the KV is lost.

        `info` may differ afterwards in its execution digest alone. DependencyError or ConfigError
        when they cannot be loaded or do not fit: then it is unloaded.
        """
        ...


class Sleep:
    """The level at which an engine sleeps, None while it is awake."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.level: SleepLevel | None = None

    def check(self, level: SleepLevel) -> None:
        """Raise ConfigError when the executor cannot do without weights, and has to."""
        if level == 2 and not isinstance(self._executor, ReloadableExecutor):
            raise ConfigError("this engine cannot do without its weights; only level 1 is served")

    def deepen(self, level: SleepLevel) -> None:
        """Sleep at least so deeply; nothing may be in flight, and no KV may matter."""
        if level == 2 and self.level != 2:
            self._reloadable.unload()
        self.level = max(level, self.level or level)

    def wake(self) -> None:
        """Have weights again; no KV."""
        if self.level == 2:
            self._reloadable.reload()
        self.level = None

    def load_weights(self, model_folder: str) -> str | None:
        """Replace the weights, at level 2; return why they could not be, the old ones are back."""
        assert self.level == 2, "weights are replaced asleep"
        try:
            self._reloadable.reload(model_folder)
        except PrefixFleetError as error:
            self._reloadable.reload()
            return str(error)
        finally:
            self.level = None
        return None

    @property
    def _reloadable(self) -> ReloadableExecutor:
        assert isinstance(self._executor, ReloadableExecutor), "level 2 was not checked"
        return self._executor


def require_same_shape(old: ExecutorInfo, new: ExecutorInfo) -> None:
    """Raise ConfigError naming a field in which another checkpoint does not fit the engine."""
    for field in ExecutorInfo.__struct_fields__:
        mine, other = getattr(old, field), getattr(new, field)
        if field != "execution_digest" and mine != other:
            raise ConfigError(f"the new weights have {field}={other}, this engine {field}={mine}")
