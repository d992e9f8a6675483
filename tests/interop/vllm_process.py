"""A real vLLM on the CPU as a child process, from an environment of its own.

`PREFIXFLEET_VLLM_PYTHON` names the interpreter of an environment with vllm (docs/interop.md says
how to make one); where it is unset, tests that need it are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.redis_server import free_port

VARIABLE = "PREFIXFLEET_VLLM_PYTHON"
START_TIMEOUT_S = 480.0
PROBE_TIMEOUT_S = 2.0
"""It listens long before it answers, so an early question would wait in vain."""
STOP_TIMEOUT_S = 20.0
BLOCK_SIZE = 32
"""vLLM's attention on a CPU wants a multiple of 32."""


def vllm_python() -> str | None:
    """Return the interpreter to start vLLM with, None when none is named."""
    return os.environ.get(VARIABLE) or None


class VllmProcess:
    """One engine, started with the flags that make a replica exact."""

    def __init__(self, folder: Path, model: Path, *, served_name: str) -> None:
        python = vllm_python()
        assert python is not None, f"{VARIABLE} is not set"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.events_port, self.replay_port = free_port(), free_port()
        self._log = folder / "vllm.log"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", served_name, "--max-model-len", "2048"),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
            *("--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE), "--enforce-eager"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events)),
        ]
        self._environ = {
            **os.environ,
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> VllmProcess:
        """Start and wait until it serves; fail with its log when it does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"no vLLM:\n{self._log.read_text()[-5000:]}")
            time.sleep(0.5)
        return self

    def restart(self) -> None:
        """Kill it and start it again on the same ports."""
        self.stop(signal.SIGKILL)
        self.start()

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """End the process and its children; does nothing when none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        os.killpg(process.pid, sig)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=PROBE_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
