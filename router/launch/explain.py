"""`prefixfleet explain ID`: one request's decision, in words and tables.

What is shown is what the gateway recorded; nothing is computed anew.
"""

from __future__ import annotations

import json

import msgspec

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.errors import PrefixFleetError
from router.launch.inspect import admin_parser, admin_path, ask
from router.launch.table import table
from router.observe.decisions import DecisionRecord
from router.policy.registry import build_policy
from router.policy.types import Candidate, Decision, Place, Rule, Shed
from router.request.job import AttemptRecord

_RULES: dict[Rule, str] = {
    "score": "",
    "affinity": " to keep it with its prefix, as all are busy",
    "copy": " for a second copy of a hot prefix",
}


def explain(invocation: Invocation) -> int:
    """Show the decision about one request: candidates, scores, winner, what came of it."""
    parser = admin_parser(invocation, "Show why a request went where it went.")
    parser.add_argument("id", help="the x-request-id of the answer")
    flags = parser.read()
    body = ask(invocation, parser, flags, admin_path("decisions", flags.id)).body
    if invocation.as_json:
        print(json.dumps(body))
        return 0
    try:
        print(describe(msgspec.convert(body, DecisionRecord)))
    except msgspec.ValidationError as error:
        raise PrefixFleetError(
            f"the gateway's record is not what this version knows ({error}); see it with --json"
        ) from None
    return 0


def describe(record: DecisionRecord) -> str:
    """Return a record as text for a person."""
    rows: list[tuple[str, object]] = [
        ("request", record.request_id),
        ("tenant, model", f"{record.tenant}, {record.model}"),
        ("status", record.status),
        ("prompt tokens", record.num_prompt_tokens),
        ("cached, predicted", record.num_predicted_tokens),
        ("cached, realised", record.usage.cached_tokens if record.usage else None),
        ("cached, best anywhere", record.num_available_tokens),
        ("difference", record.cause),
        ("waited", _seconds(record.queue_s)),
        ("first token", _seconds(record.ttft_s)),
        ("duration", _seconds(record.duration_s)),
        ("resumed", record.num_resumes or None),
    ]
    lines = [f"{name:<23}{'-' if value is None else value}" for name, value in rows]
    for attempt in record.attempts:
        lines += ["", _outcome(attempt), _candidates(attempt.decision)]
    return "\n".join(lines)


def _outcome(attempt: AttemptRecord) -> str:
    decision, head = attempt.decision, f"attempt {attempt.attempt}"
    if isinstance(decision, Place):
        failed = f", which failed: {attempt.failure}" if attempt.failure else ""
        chosen = f"{decision.policy} chose {decision.winner.target}{_RULES[decision.rule]}{failed}"
        return f"{head}: {chosen}\n{_score(decision)}"
    if isinstance(decision, Shed):
        return (
            f"{head}: shed, every replica is too far behind; again in {decision.retry_after_s:g} s"
        )
    return f"{head}: no replica, {decision.reason}"


def _score(place: Place) -> str:
    """Show the sum that won; a target chosen by affinity or for a copy may have a higher one."""
    policy = build_policy(place.policy, place.params, owner="this decision")
    rated = [candidate for candidate in place.candidates if candidate.score is not None]
    summands = policy.parts(place.winner, rated)
    parts = " + ".join(f"{part.name} {part.value:.4g}" for part in summands)
    return f"score {place.winner.score:.4g} = {parts}"


def _candidates(decision: Decision) -> str:
    winner = decision.winner.target if isinstance(decision, Place) else None
    return table([_row(candidate, winner=winner) for candidate in decision.candidates])


def _row(candidate: Candidate, *, winner: object) -> dict[str, object]:
    return {
        "": "*" if candidate.target == winner else "",
        "replica": str(candidate.target),
        "mode": candidate.mode,
        "cached": candidate.num_cached_tokens,
        "reusable": candidate.num_reusable_tokens,
        "uncached": candidate.num_uncached_tokens,
        "active": candidate.num_active,
        "queued prefill": candidate.queued_prefill_tokens,
        "expected s": candidate.expected_s,
        "score": candidate.score,
        "excluded": candidate.excluded,
    }


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f} s"
