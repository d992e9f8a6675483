// Decisions: the newest requests of the fleet as they end, and what each was decided by.

import {clock, element, facts, mark, refill, seconds, table, whole} from "./dom.js";
import {ask, fleet} from "./fleet.js";

function placeOf(record) {
  const placed = record.attempts.map((a) => a.decision).filter((d) => d.type === "place");
  return placed.length ? placed[placed.length - 1] : null;
}

const targetName = (target) => target.dp_rank ? `${target.replica}/${target.dp_rank}` : target.replica;

const DECISION_COLUMNS = [
  {head: "time", cell: (r) => clock(r.at), kind: "tight"},
  {head: "request", cell: (r) => r.request_id},
  {head: "tenant", cell: (r) => r.tenant},
  {head: "replica", cell: (r) => placeOf(r) ? targetName(placeOf(r).winner.target) : "–"},
  {head: "status", cell: (r) => mark(String(r.status), r.status < 400 ? "good" : "bad"), kind: "number"},
  {head: "prompt", cell: (r) => whole(r.num_prompt_tokens), kind: "number"},
  {head: "available", cell: (r) => whole(r.num_available_tokens), kind: "number"},
  {head: "predicted", cell: (r) => whole(r.num_predicted_tokens), kind: "number"},
  {head: "realised", cell: (r) => whole(r.usage && r.usage.cached_tokens), kind: "number"},
  {head: "TTFT", cell: (r) => seconds(r.ttft_s), kind: "number"},
];

const CANDIDATE_COLUMNS = [
  {head: "", cell: (c) => c.won ? mark("chosen", "good") : c.excluded ? mark(c.excluded, "warn") : ""},
  {head: "replica", cell: (c) => targetName(c.target)},
  {head: "cached", cell: (c) => whole(c.num_cached_tokens), kind: "number"},
  {head: "to compute", cell: (c) => whole(c.num_uncached_tokens), kind: "number"},
  {head: "active", cell: (c) => whole(c.num_active), kind: "number"},
  {head: "queue", cell: (c) => seconds(c.queue_s), kind: "number"},
  {head: "first token expected", cell: (c) => seconds(c.expected_s), kind: "number"},
  {head: "score", cell: (c) => c.score === null || c.score === undefined ? "–" : c.score.toFixed(3), kind: "number"},
];

export function explanation(record) {
  const parts = record.attempts.map((attempt) => {
    const decision = attempt.decision;
    const won = decision.winner ? targetName(decision.winner.target) : null;
    const rows = (decision.candidates || []).map((c) => ({...c, won: targetName(c.target) === won}));
    return [
      element("h2", {}, `Attempt ${attempt.attempt}: ` + (won
        ? `${won} by ${decision.policy} (${decision.rule || "score"})`
        : decision.reason || decision.type)),
      attempt.failure ? element("p", {class: "bad"}, attempt.failure) : null,
      table(CANDIDATE_COLUMNS, rows, {empty: "No candidate."}),
    ];
  });
  return element("div", {},
    facts([
      ["request", record.request_id],
      ["tenant, model", `${record.tenant}, ${record.model}`],
      ["status", String(record.status)],
      ["prompt tokens", whole(record.num_prompt_tokens)],
      ["cached: available / predicted / realised",
        [record.num_available_tokens, record.num_predicted_tokens,
          record.usage && record.usage.cached_tokens].map(whole).join(" / ")],
      ["cause of a difference", record.cause || "none"],
      ["queue, first token, total",
        [record.queue_s, record.ttft_s, record.duration_s].map(seconds).join(", ")],
      ["resumed", whole(record.num_resumes)],
    ]),
    parts.length ? parts.flat() : element("p", {class: "note"}, "It ended before it was placed."));
}

function showDecision(record) {
  const close = element("button", {type: "button", on: {click: () => dialog.close()}}, "Close");
  const dialog = element("dialog", {"aria-label": "Decision"}, explanation(record), close);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function openDecisions(place) {
  const error = element("p", {role: "alert", class: "bad"});
  const id = element("input", {name: "id", placeholder: "request id", "aria-label": "request id", required: true});
  const search = element("form", {class: "inline", on: {submit: async (event) => {
    event.preventDefault();
    error.textContent = "";
    try {
      showDecision(await ask(`/admin/decisions/${encodeURIComponent(id.value.trim())}`));
    } catch (problem) {
      error.textContent = problem.message;
    }
  }}}, id, element("button", {type: "submit"}, "Explain"));
  const list = element("div");
  place.append(search, error, list);
  return {
    update() {
      refill(list, table(DECISION_COLUMNS, fleet.decisions, {
        pick: showDecision, key: (r) => r.unique_id, empty: "No request has ended yet.",
      }));
    },
  };
}
