"""LiteLLM's proxy before some engines, as a peer of bench_gateway.py: without keys, limits or logs.

    VENV/bin/python benchmarks/litellm_proxy.py --port 9105 http://127.0.0.1:9001 [URL ...]

VENV is an environment of its own with `litellm[proxy]`; nothing of ours is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

_MODEL = "smollm2"  # What fake_engine.py serves.


def config(engines: list[str]) -> dict[str, object]:
    """Return the proxy's configuration: one model, served by all engines alike."""
    return {
        "model_list": [
            {
                "model_name": _MODEL,
                "litellm_params": {
                    "model": f"openai/{_MODEL}",
                    "api_base": f"{engine}/v1",
                    "api_key": "none",
                },
            }
            for engine in engines
        ],
        "router_settings": {"routing_strategy": "least-busy"},
    }


def main() -> None:
    """Become the proxy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", required=True)
    parser.add_argument("engines", nargs="+")
    options = parser.parse_args()
    file = Path(tempfile.mkdtemp(prefix="litellm-")) / "config.yaml"
    file.write_text(json.dumps(config(options.engines)))  # JSON is YAML.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else it fetches prices at its start.
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # As bare does.
    program = Path(sys.executable).with_name("litellm")
    words = ["--config", str(file), "--host", "127.0.0.1", "--port", options.port]
    os.execv(program, [str(program), *words, "--num_workers", "1"])


if __name__ == "__main__":
    main()
