"""What `up` prints once a fleet is ready: addresses, keys, a request to paste, what to look at.

Text only, from what fleet.json says.
"""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit

from router.launch.fleet_file import FleetFile

_SYSTEM = (
    "You are the assistant of a small library. Answer in one short sentence. The library opens "
    "at nine in the morning and closes at six in the evening, on Saturdays at noon, and stays "
    "closed on Sundays and on public holidays. A reader may borrow ten books for four weeks and "
    "extend each loan twice, unless somebody else has reserved the book."
)
_QUESTION = "How many books may I borrow?"


def ready_text(file: FleetFile, elapsed_s: float) -> str:
    """Describe a fleet that has just become ready."""
    keys = [f"  key of {tenant:<10} {key}" for tenant, key in file.keys.items()]
    logs = [f"  {process:<12} {path}" for process, path in file.logs.items()]
    return "\n".join(
        [
            "",
            f"ready after {elapsed_s:.1f} s: {file.model} on {len(file.replicas)} replicas",
            "",
            f"  API          {file.url}/v1",
            f"  admin API    {file.admin_url}  (key {file.admin_key})",
            *keys,
            "",
            "Try it:",
            "",
            f"  {curl(file)}",
            "",
            "Run it twice: usage.prompt_tokens_details.cached_tokens goes from 0 to N, and the "
            "header",
            "x-prefixfleet-cached-tokens-predicted says so before the answer. With the "
            "x-request-id",
            "of an answer,",
            "",
            f"  prefixfleet explain ID --run-dir {shlex.quote(file.run_dir)}",
            "",
            "shows the replicas that were considered, and why one of them was chosen.",
            "",
            "Logs:",
            *logs,
            "",
            f"All of this for programs: {file.run_dir}/fleet.json",
            "Stop with Ctrl-C, or from elsewhere with "
            f"`prefixfleet down --run-dir {shlex.quote(file.run_dir)}`.",
            "",
        ]
    )


def curl(file: FleetFile) -> str:
    """Return a request that works when pasted; its prompt spans several blocks."""
    key = next(iter(file.keys.values()), "$YOUR_KEY")
    body = {
        "model": file.model,
        "max_tokens": 32,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _QUESTION},
        ],
    }
    return (
        f"curl -si {_reach(file)}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _reach(file: FleetFile) -> str:
    """Return curl's words for the gateway: by a name that its certificate is for."""
    if file.tls is None:
        return file.url
    url, ca = urlsplit(file.url), f"--cacert {shlex.quote(file.tls.certificate)}"
    if url.hostname == file.tls.name:
        return f"{ca} {file.url}"
    return f"{ca} --connect-to ::{url.hostname}: https://{file.tls.name}:{url.port}"
