"""An executor that can be without its model for a while, and come back with another checkpoint.

It builds the real executor anew from its spec, so it knows nothing of models, processes or
devices, and whatever kind that is gives everything back in between.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.executor import Executor, ExecutorInfo
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.sleep import require_same_shape
from kvindex.foundation.errors import PrefixFleetError
from worker.core.spec import CoreSpec


class ReloadingExecutor:
    """ReloadableExecutor over what `build` makes of a spec; raises what `build` raises.

    What takes the place of the first one gets as many blocks, whatever memory is free then.
    """

    def __init__(self, spec: CoreSpec, build: Callable[[CoreSpec], Executor]) -> None:
        self._build = build
        self._executor: Executor | None = build(spec)
        self._info = self._executor.info
        self._spec = msgspec.structs.replace(spec, num_blocks=self._info.num_blocks)

    @property
    def info(self) -> ExecutorInfo:
        """What the executor said when it was built, also while it is unloaded."""
        return self._info

    @property
    def inner(self) -> Executor:
        """The executor that computes now."""
        assert self._executor is not None, "the executor is unloaded or closed"
        return self._executor

    def submit(self, step: SchedulerOutput) -> None:
        """Take in the next step; see Executor."""
        self.inner.submit(step)

    def collect(self) -> ModelRunnerOutput:
        """Return what the oldest step computed; see Executor."""
        return self.inner.collect()

    def unload(self) -> None:
        """Give back weights, KV cache and processes."""
        self.close()

    def reload(self, model_folder: str | None = None) -> None:
        """Build the executor again; see ReloadableExecutor."""
        assert self._executor is None, "the executor is loaded"
        spec = self._spec
        if model_folder is not None:
            spec = msgspec.structs.replace(spec, model_folder=model_folder)
        executor = self._build(spec)
        try:
            require_same_shape(self._info, executor.info)
        except PrefixFleetError:
            executor.close()
            raise
        self._executor, self._info, self._spec = executor, executor.info, spec

    def close(self) -> None:
        """Free memory, processes and sockets. Idempotent."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None
