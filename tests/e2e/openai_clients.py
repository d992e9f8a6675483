"""OpenAI's own client at both doors of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import openai

from router.launch.run_dir import RunDirectory
from router.launch.secrets import load_secrets
from tests.e2e.fleet_process import FleetProcess


@contextmanager
def openai_clients(fleet: FleetProcess) -> Iterator[list[openai.OpenAI]]:
    """Open two clients, one of the gateway, one of the first replica."""
    token = load_secrets(RunDirectory(fleet.run_dir)).internal_token
    doors = [(fleet.file.url, fleet.key()), (fleet.file.replicas[0].url, token)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))
            for url, key in doors
        ]
