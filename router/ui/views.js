// The views. Each `open(place)` builds its frame once and returns {update} for every look at the fleet.

import {ask, fleet} from "./app.js";
import {bars, draw, lines} from "./charts.js";
import {clock, element, facts, mark, seconds, share, table, whole} from "./dom.js";

const MODE = {EXACT: "good", DEGRADED: "warn", FALLBACK: "bad"};

function replicaCard(replica) {
  const cached = Object.entries(replica.num_blocks || {}).filter(([, n]) => n);
  const used = Object.values(replica.num_blocks || {})[0] || 0;
  const report = replica.report;
  return element("article", {class: "card", "data-replica": replica.id},
    element("h3", {}, replica.id),
    mark(replica.live ? replica.mode : "not live", replica.live ? MODE[replica.mode] : "bad"),
    replica.reason ? element("p", {class: "note"}, replica.reason) : null,
    facts([
      ["requests here", whole(replica.num_active)],
      ["running / waiting", `${whole(report.num_running)} / ${whole(report.num_waiting)}`],
      ["cached blocks", cached.map(([tier, n]) => `${whole(n)} ${tier}`).join(", ") || "none"],
      ["prefill", `${whole(report.prefill_tokens_per_s)} tok/s`],
      ["breaker", replica.breaker],
      ["models", replica.served_models.join(", ")],
      ["epoch", replica.epoch === null ? "–" : String(replica.epoch)],
    ]),
    replica.max_blocks ? element("progress",
      {class: "bar", max: replica.max_blocks, value: used, "aria-label": "cached share of the blocks"}) : null);
}

function openFleet(place) {
  const cards = element("div", {class: "cards"});
  const load = element("div", {class: "chart"});
  place.append(cards, element("h2", {}, "Requests by replica"), load);
  return {
    update() {
      cards.replaceChildren(...fleet.state.replicas.map(replicaCard));
      const series = new Map(fleet.state.replicas.map((r) =>
        [r.id, fleet.history.map((h) => [h.at, h.active[r.id] || 0])]));
      series.set("waiting in the gateway", fleet.history.map((h) => [h.at, h.waiting]));
      draw(load, lines(series), {y: "requests"});
    },
  };
}

function placeOf(record) {
  const placed = record.attempts.map((a) => a.decision).filter((d) => d.type === "place");
  return placed.length ? placed[placed.length - 1] : null;
}

const targetName = (target) => target.dp_rank ? `${target.replica}/${target.dp_rank}` : target.replica;

const DECISION_COLUMNS = [
  {head: "time", cell: (r) => clock(r.at)},
  {head: "request", cell: (r) => r.request_id},
  {head: "tenant", cell: (r) => r.tenant},
  {head: "replica", cell: (r) => placeOf(r) ? targetName(placeOf(r).winner.target) : "–"},
  {head: "status", cell: (r) => mark(String(r.status), r.status < 400 ? "good" : "bad"), number: true},
  {head: "prompt", cell: (r) => whole(r.num_prompt_tokens), number: true},
  {head: "available", cell: (r) => whole(r.num_available_tokens), number: true},
  {head: "predicted", cell: (r) => whole(r.num_predicted_tokens), number: true},
  {head: "realised", cell: (r) => whole(r.usage && r.usage.cached_tokens), number: true},
  {head: "TTFT", cell: (r) => seconds(r.ttft_s), number: true},
];

const CANDIDATE_COLUMNS = [
  {head: "", cell: (c) => c.won ? mark("chosen", "good") : c.excluded ? mark(c.excluded, "warn") : ""},
  {head: "replica", cell: (c) => targetName(c.target)},
  {head: "cached", cell: (c) => whole(c.num_cached_tokens), number: true},
  {head: "to compute", cell: (c) => whole(c.num_uncached_tokens), number: true},
  {head: "active", cell: (c) => whole(c.num_active), number: true},
  {head: "queue", cell: (c) => seconds(c.queue_s), number: true},
  {head: "first token expected", cell: (c) => seconds(c.expected_s), number: true},
  {head: "score", cell: (c) => c.score === null || c.score === undefined ? "–" : c.score.toFixed(3), number: true},
];

function explanation(record) {
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
      ["prompt tokens", whole(record.num_prompt_tokens)],
      ["cached: available / predicted / realised",
        [record.num_available_tokens, record.num_predicted_tokens,
          record.usage && record.usage.cached_tokens].map(whole).join(" / ")],
      ["cause of a difference", record.cause || "none"],
      ["queue, first token, total",
        [record.queue_s, record.ttft_s, record.duration_s].map(seconds).join(", ")],
    ]),
    parts.flat());
}

function showDecision(record) {
  const close = element("button", {type: "button", on: {click: () => dialog.close()}}, "Close");
  const dialog = element("dialog", {"aria-label": "Decision"}, explanation(record), close);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function openDecisions(place) {
  const error = element("p", {role: "alert", class: "bad"});
  const id = element("input", {name: "id", placeholder: "request id", "aria-label": "request id"});
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
      list.replaceChildren(table(DECISION_COLUMNS, fleet.decisions, {
        pick: showDecision, empty: "No request has ended since this page was opened.",
      }));
    },
  };
}

function openIndex(place) {
  const totals = element("div");
  const hot = element("div");
  place.append(element("h2", {}, "Cached blocks"), totals, element("h2", {}, "Hottest shared prefixes"), hot);
  let asked = 0;
  return {
    async update() {
      totals.replaceChildren(table([
        {head: "replica", cell: (r) => r.id},
        {head: "mode", cell: (r) => mark(r.mode, MODE[r.mode])},
        {head: "gpu blocks", cell: (r) => whole((r.num_blocks || {}).gpu), number: true},
        {head: "host blocks", cell: (r) => whole((r.num_blocks || {}).host), number: true},
        {head: "capacity", cell: (r) => whole(r.max_blocks), number: true},
      ], fleet.state.replicas));
      if (Date.now() - asked < 4000) return;
      asked = Date.now();
      const found = await ask("/admin/index/hot").catch((error) => ({prefixes: [], reason: error.message}));
      hot.replaceChildren(
        found.reason ? element("p", {class: "warn"}, found.reason) : "",
        table([
          {head: "prefix", cell: (p) => p.name},
          {head: "tenant", cell: (p) => p.tenant},
          {head: "tokens", cell: (p) => whole(p.num_tokens), number: true},
          {head: "recent requests", cell: (p) => p.heat.toFixed(1), number: true},
          {head: "held by (blocks)", cell: (p) => Object.entries(p.holders)
            .map(([target, n]) => `${target} (${n}/${p.num_blocks})`).join(", ") || "nobody"},
          {head: "copies", cell: (p) => whole(Object.values(p.holders).filter((n) => n === p.num_blocks).length), number: true},
        ], found.prefixes, {empty: "No two requests have shared a prefix yet."}));
    },
  };
}

function limitText(tenant) {
  const use = tenant.use;
  if (!use) return "unknown";
  const parts = [
    ["requests/min", use.num_requests, tenant.limits.requests_per_minute],
    ["tokens/min", use.num_tokens, tenant.limits.tokens_per_minute],
    ["at a time", use.num_running, tenant.limits.max_parallel],
    ["tokens today", use.day_tokens, tenant.limits.tokens_per_day],
    ["tokens this month", use.month_tokens, tenant.limits.tokens_per_month],
  ].filter(([, , limit]) => limit);
  return parts.map(([name, used, limit]) => `${whole(used)} / ${whole(limit)} ${name}`).join(", ") || "no limit";
}

function openTenants(place) {
  const rows = element("div");
  const chart = element("div", {class: "chart"});
  const usage = element("div");
  place.append(rows, element("h2", {}, "Cached prompt tokens"), chart,
    element("h2", {}, "Usage by tenant and key"), usage);
  ask("/admin/usage").then((answer) => usage.replaceChildren(table([
    {head: "day", cell: (t) => t.day}, {head: "tenant", cell: (t) => t.tenant},
    {head: "key", cell: (t) => t.key || "–"}, {head: "model", cell: (t) => t.model},
    {head: "requests", cell: (t) => whole(t.requests), number: true},
    {head: "uncached", cell: (t) => whole(t.uncached_tokens), number: true},
    {head: "cached", cell: (t) => whole(t.cached_tokens), number: true},
    {head: "output", cell: (t) => whole(t.output_tokens), number: true},
    {head: "charged", cell: (t) => whole(t.charged_tokens), number: true},
  ], answer.totals)), (error) => usage.replaceChildren(error.message));
  return {
    update() {
      const tenants = fleet.state.tenants;
      rows.replaceChildren(table([
        {head: "tenant", cell: (t) => t.name},
        {head: "requests", cell: (t) => whole(t.requests), number: true},
        {head: "refused (429)", cell: (t) => whole(t.refused), number: true},
        {head: "prompt tokens", cell: (t) => whole(t.prompt_tokens), number: true},
        {head: "of which cached", cell: (t) => share(t.realised_tokens, t.prompt_tokens), number: true},
        {head: "charged tokens", cell: (t) => whole(t.charged_tokens), number: true},
        {head: "limits", cell: limitText},
      ], tenants));
      draw(chart, bars(tenants.map((t) => t.name), [
        ["available anywhere", tenants.map((t) => t.available_tokens)],
        ["where it was sent", tenants.map((t) => t.predicted_tokens)],
        ["realised", tenants.map((t) => t.realised_tokens)],
      ]), {y: "tokens"});
    },
  };
}

function openKeys(place) {
  const list = element("div");
  const made = element("pre", {hidden: true, role: "status"});
  place.append(list, made);

  async function load() {
    const {tenants} = await ask("/admin/tenants");
    const rows = tenants.flatMap((shown) => shown.keys);
    list.replaceChildren(table([
      {head: "tenant", cell: (k) => k.tenant}, {head: "key", cell: (k) => k.alias || k.id},
      {head: "owner", cell: (k) => k.owner || "–"},
      {head: "state", cell: (k) => k.blocked ? mark("blocked", "bad") : mark("active", "good")},
      {head: "", cell: (k) => k.declared ? "from the configuration" : element("button",
        {type: "button", disabled: fleet.state.role === "viewer", on: {click: () => rotate(k)}}, "Rotate")},
    ], rows));
  }

  async function rotate(key) {
    if (!confirm(`Make a new key for ${key.tenant} in place of ${key.alias || key.id}?`)) return;
    try {
      const path = `/admin/tenants/${encodeURIComponent(key.tenant)}/keys/${encodeURIComponent(key.alias || key.id)}`;
      const answer = await ask(`${path}/rotate`, {method: "POST", body: {}});
      made.textContent = `The new key, shown once: ${answer.key}`;
    } catch (error) {
      made.textContent = error.message;
    }
    made.hidden = false;
    await load();
  }

  load().catch((error) => list.replaceChildren(error.message));
  return {};
}

function openPlayground(place) {
  const tenant = element("select", {name: "tenant"});
  const model = element("select", {name: "model"});
  const prompt = element("textarea", {name: "prompt", required: true});
  const tokens = element("input", {name: "max_tokens", type: "number", min: "1", value: "64"});
  const result = element("div", {"aria-live": "polite"});
  const send = element("button", {type: "submit", class: "primary"}, "Send");
  const form = element("form", {on: {submit: async (event) => {
    event.preventDefault();
    send.disabled = true;
    result.replaceChildren("Waiting for the answer …");
    try {
      const body = {
        tenant: tenant.value, model: model.value, prompt: prompt.value, max_tokens: Number(tokens.value),
      };
      const {answer, decision} = await ask("/admin/playground", {method: "POST", body});
      result.replaceChildren(
        element("h2", {}, "Answer"), element("pre", {}, answer.choices[0].message.content || ""),
        element("h2", {}, "Where it went and why"), decision ? explanation(decision) : "No decision.");
    } catch (error) {
      result.replaceChildren(element("p", {class: "bad"}, error.message));
    }
    send.disabled = false;
  }}},
  element("label", {}, "Tenant", tenant), element("label", {}, "Model", model),
  element("label", {}, "Prompt", prompt), element("label", {}, "Tokens at most", tokens), send);
  place.append(form, result);
  const fill = (select, names) => {
    if (select.children.length === names.length) return;
    select.replaceChildren(...names.map((name) => element("option", {}, name)));
  };
  return {
    update() {
      fill(tenant, fleet.state.tenants.map((t) => t.name));
      fill(model, [...new Set(fleet.state.replicas.flatMap((r) => r.served_models))]);
    },
  };
}

export const VIEWS = {
  fleet: {title: "Fleet", open: openFleet},
  decisions: {title: "Decisions", open: openDecisions},
  index: {title: "Index", open: openIndex},
  tenants: {title: "Tenants", open: openTenants},
  keys: {title: "Keys", open: openKeys},
  playground: {title: "Playground", open: openPlayground},
};
