"""One line per request, key=value, with neither prompt nor key in it."""

from __future__ import annotations

import logging

from router.observe.decisions import DecisionRecord

log = logging.getLogger("prefixfleet.access")


def log_request(record: DecisionRecord, *, path: str, key_alias: str, replica: str | None) -> None:
    """Write the line of a finished request."""
    usage = record.usage
    log.info(
        "request_id=%s path=%s tenant=%s key=%s model=%s status=%d replica=%s attempts=%d "
        "prompt_tokens=%s cached_predicted=%s cached=%s completion_tokens=%s "
        "ttft_ms=%s duration_ms=%.0f",
        record.request_id,
        path,
        record.tenant,
        key_alias or "-",
        record.model or "-",
        record.status,
        replica or "-",
        len(record.attempts),
        _text(usage.prompt_tokens if usage else record.num_prompt_tokens),
        _text(record.num_predicted_tokens),
        _text(usage.cached_tokens if usage else None),
        _text(usage.completion_tokens if usage else None),
        "-" if record.ttft_s is None else f"{record.ttft_s * 1000:.0f}",
        record.duration_s * 1000,
    )


def log_refusal(request_id: str, *, path: str, tenant: str, status: int) -> None:
    """Write the line of a request that was refused before anything of it was understood."""
    log.info("request_id=%s path=%s tenant=%s status=%d", request_id, path, tenant, status)


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)
