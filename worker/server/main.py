"""The replica's front process: `python -P -m worker.server.main --config-json FILE`.

It reads the spec, runs the front and turns its end into an exit code: 0 stopped, 1 the engine
died, 2 a setting is wrong, 3 something needed is not there. The engine takes longest to start, so
it is started before what serves it is loaded. torch is never imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence

from kvindex.foundation.errors import ConfigError, DependencyError, HashMismatchError
from kvindex.foundation.logs import setup_logging
from worker.core.garbage import load_without_collecting
from worker.server.engine_start import EngineStart
from worker.server.spec import ReplicaSpec, read_spec
from worker.server.stop_signals import StopSignals

_log = logging.getLogger("prefixfleet.replica")

EXIT_CONFIG = 2
EXIT_DEPENDENCY = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica; return the exit code."""
    parser = argparse.ArgumentParser(prog="worker.server.main", description="Run one replica.")
    parser.add_argument(
        "--config-json", required=True, metavar="FILE", help="the replica's spec, - for stdin"
    )
    arguments = parser.parse_args(argv)
    try:
        spec = read_spec(arguments.config_json)
        setup_logging(spec.replica_id)
        return _run(spec)
    except (ConfigError, HashMismatchError) as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DependencyError as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_DEPENDENCY


def _run(spec: ReplicaSpec) -> int:
    async def run() -> int:
        stop = StopSignals()
        with stop.installed():
            start = EngineStart(spec)
            try:
                await asyncio.sleep(0)  # The core is spawned now, not when imports pause.
                serve = await asyncio.to_thread(_loaded_serve)
                return await serve(start, stop)
            finally:
                await start.close()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def _loaded_serve() -> Callable[[EngineStart, StopSignals], Awaitable[int]]:
    from worker.server.lifecycle import serve

    return serve


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    load_without_collecting()
    sys.exit(main())
