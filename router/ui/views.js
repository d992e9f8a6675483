// The views. Each `open(place)` builds its frame once; it returns {update} for every look at the fleet,
// and {close} where something is to be ended with it.

import {bars, draw, lines} from "./charts.js";
import {explanation, openDecisions} from "./decisions.js";
import {element, facts, fill, mark, refill, share, table, utc, whole} from "./dom.js";
import {openDryRun} from "./dry_run.js";
import {ask, fleet} from "./fleet.js";

const MODE = {EXACT: "good", DEGRADED: "warn", FALLBACK: "bad"};
const modeOf = (replica) => replica.live ? mark(replica.mode, MODE[replica.mode]) : mark("not live", "bad");

// Return an update that asks for something at most every so many milliseconds, and shows what it gets.
function polling(path, everyMs, place, nodes) {
  let next = 0;
  return async () => {
    if (Date.now() < next) return;
    next = Date.now() + everyMs;
    try {
      refill(place, ...nodes(await ask(path)));
    } catch (error) {
      refill(place, element("p", {class: "bad"}, error.message));
    }
  };
}

function replicaCard(replica) {
  const cached = Object.entries(replica.num_blocks || {}).filter(([, n]) => n);
  const used = (replica.num_blocks || {}).gpu || 0;
  const report = replica.report;
  return element("article", {class: "card", "data-replica": replica.id},
    element("h3", {}, replica.id),
    modeOf(replica),
    replica.reason ? element("p", {class: "note"}, replica.reason) : null,
    facts([
      ["requests here", whole(replica.num_active)],
      ["running / waiting", `${whole(report.num_running)} / ${whole(report.num_waiting)}`],
      ["hit rate (prompt tokens)", share(replica.cached_tokens, replica.prompt_tokens)],
      ["cached blocks", cached.map(([tier, n]) => `${whole(n)} ${tier}`).join(", ") || "none"],
      ["prefill", `${whole(report.prefill_tokens_per_s)} tok/s`],
      ["breaker", replica.breaker],
      ["models", replica.served_models.join(", ")],
      ["restarts seen", whole(replica.num_restarts)],
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
      const now = fleet.state.at;
      draw(load, lines(series), {y: "requests", seconds: [Math.min(fleet.history[0].at, now - 60), now]});
    },
  };
}

// Each prefix below the one that it begins with, with its depth in the tree.
function treeOf(prefixes, parent = null, depth = 0) {
  return prefixes.filter((p) => p.parent === parent)
    .flatMap((p) => [{...p, depth}, ...treeOf(prefixes, p.name, depth + 1)]);
}

const PREFIX_COLUMNS = [
  {head: "prefix", cell: (p) => element("span", {class: `prefix depth-${Math.min(p.depth, 4)}`}, p.name)},
  {head: "tenant", cell: (p) => p.tenant},
  {head: "tokens", cell: (p) => whole(p.num_tokens), kind: "number"},
  {head: "recent requests", cell: (p) => p.heat.toFixed(1), kind: "number"},
  {head: "held by (blocks)", cell: (p) => Object.entries(p.holders)
    .map(([target, n]) => `${target.replace(/\/0$/, "")} (${n}/${p.num_blocks})`).join(", ") || "nobody"},
  {head: "whole copies", cell: (p) =>
    whole(Object.values(p.holders).filter((n) => n === p.num_blocks).length), kind: "number"},
  {head: "own blocks", cell: (p) => whole(p.num_held_blocks), kind: "number"},
  {head: "duplicates", cell: (p) => whole(p.num_duplicates), kind: "number"},
];

function duplication(prefixes) {
  const sum = (field) => prefixes.reduce((total, p) => total + p[field], 0);
  const held = sum("num_held_blocks");
  const copies = sum("num_duplicates");
  return `${whole(held)} blocks of these are cached, and ${whole(copies)} more as duplicates on other replicas.`;
}

function openIndex(place) {
  const totals = element("div");
  const hot = element("div");
  place.append(element("h2", {}, "Cached blocks"), totals, element("h2", {}, "Hottest shared prefixes"), hot);
  const showHot = polling("/admin/index/hot", 4000, hot, ({prefixes, reason}) => [
    reason ? element("p", {class: "warn"}, `Nobody knows who holds them: ${reason}`) : "",
    prefixes.length ? element("p", {class: "note"}, duplication(prefixes)) : "",
    table(PREFIX_COLUMNS, treeOf(prefixes), {empty: "No two requests have shared a prefix yet."}),
  ]);
  return {
    update() {
      refill(totals, table([
        {head: "replica", cell: (r) => r.id},
        {head: "mode", cell: modeOf},
        {head: "gpu blocks", cell: (r) => whole((r.num_blocks || {}).gpu), kind: "number"},
        {head: "host blocks", cell: (r) => whole((r.num_blocks || {}).host), kind: "number"},
        {head: "capacity", cell: (r) => whole(r.max_blocks), kind: "number"},
      ], fleet.state.replicas));
      showHot();
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
  const showUsage = polling("/admin/usage", 10000, usage, ({totals}) => [table([
    {head: "day", cell: (t) => t.day, kind: "tight"}, {head: "tenant", cell: (t) => t.tenant},
    {head: "key", cell: (t) => t.key || "–"}, {head: "model", cell: (t) => t.model},
    {head: "requests", cell: (t) => whole(t.requests), kind: "number"},
    {head: "uncached", cell: (t) => whole(t.uncached_tokens), kind: "number"},
    {head: "cached", cell: (t) => whole(t.cached_tokens), kind: "number"},
    {head: "output", cell: (t) => whole(t.output_tokens), kind: "number"},
    {head: "charged", cell: (t) => whole(t.charged_tokens), kind: "number"},
  ], totals)]);
  return {
    update() {
      const {tenants, num_tenants: number} = fleet.state;
      refill(rows, number > tenants.length ? element("p", {class: "note"},
        `The first ${whole(tenants.length)} of ${whole(number)} tenants; prefixfleet tenant list has all.`) : "", table([
        {head: "tenant", cell: (t) => t.name},
        {head: "requests", cell: (t) => whole(t.requests), kind: "number"},
        {head: "waiting", cell: (t) => whole(t.num_waiting), kind: "number"},
        {head: "refused (429)", cell: (t) => whole(t.refused), kind: "number"},
        {head: "prompt tokens", cell: (t) => whole(t.prompt_tokens), kind: "number"},
        {head: "of which cached", cell: (t) => share(t.realised_tokens, t.prompt_tokens), kind: "number"},
        {head: "charged tokens", cell: (t) => whole(t.charged_tokens), kind: "number"},
        {head: "limits", cell: limitText},
      ], tenants));
      draw(chart, bars(tenants.map((t) => t.name), [
        ["available anywhere", tenants.map((t) => t.available_tokens)],
        ["where it was sent", tenants.map((t) => t.predicted_tokens)],
        ["realised", tenants.map((t) => t.realised_tokens)],
      ]), {y: "tokens"});
      showUsage();
    },
  };
}

function refusalOf(tenant, key) {
  if (tenant.blocked) return "tenant blocked";
  if (key.blocked) return "blocked";
  return key.expires_at && key.expires_at <= fleet.state.at ? "expired" : "";
}

function openKeys(place) {
  const list = element("div");
  const made = element("pre", {hidden: true, role: "status"});
  place.append(list, made);

  async function load() {
    const {tenants} = await ask("/admin/tenants");
    const rows = tenants.flatMap(({tenant, keys}) => keys.map((key) => ({...key, refused: refusalOf(tenant, key)})));
    list.replaceChildren(table([
      {head: "tenant", cell: (k) => k.tenant}, {head: "key", cell: (k) => k.alias || k.id},
      {head: "owner", cell: (k) => k.owner || "–"},
      {head: "expires (UTC)", cell: (k) => k.expires_at ? utc(k.expires_at) : "–", kind: "tight"},
      {head: "state", cell: (k) => k.refused ? mark(k.refused, "bad") : mark("active", "good")},
      {head: "", cell: (k) => k.declared ? "from the configuration" : element("button",
        {type: "button", disabled: fleet.state.role === "viewer", on: {click: () => rotate(k)}}, "Rotate")},
    ], rows));
  }

  async function rotate(key) {
    if (!confirm(`Make a new key for ${key.tenant} in place of ${key.alias || key.id}?`)) return;
    try {
      const path = `/admin/tenants/${encodeURIComponent(key.tenant)}/keys/${encodeURIComponent(key.id)}`;
      const answer = await ask(`${path}/rotate`, {method: "POST", body: {}});
      made.textContent = `The new key, shown once: ${answer.key}\nThe old one works for another day.`;
    } catch (error) {
      made.textContent = error.message;
    }
    made.hidden = false;
    show();
  }

  const show = () => load().catch((error) => list.replaceChildren(error.message));
  show();
  return {};
}

function openPlayground(place) {
  const tenant = element("select", {name: "tenant"});
  const model = element("select", {name: "model"});
  const prompt = element("textarea", {name: "prompt", required: true});
  const tokens = element("input", {name: "max_tokens", type: "number", min: "1", value: "64", required: true});
  const result = element("div", {"aria-live": "polite"});
  const send = element("button", {type: "submit", class: "primary"}, "Send");
  const ending = new AbortController();
  const form = element("form", {on: {submit: async (event) => {
    event.preventDefault();
    send.disabled = true;
    result.replaceChildren("Waiting for the answer …");
    try {
      const body = {
        tenant: tenant.value, model: model.value, prompt: prompt.value, max_tokens: Number(tokens.value),
      };
      const {answer, decision} = await ask("/admin/playground", {method: "POST", body, signal: ending.signal});
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
  if (fleet.state.role === "viewer") {
    send.disabled = true;
    result.append(element("p", {class: "note"}, "A viewer's key reads, and sends nothing."));
  }
  return {
    update() {
      fill(tenant, fleet.state.tenants.map((t) => t.name));
      fill(model, [...new Set(fleet.state.replicas.flatMap((r) => r.served_models))]);
    },
    close: () => ending.abort(),
  };
}

export const VIEWS = {
  fleet: {title: "Fleet", open: openFleet},
  decisions: {title: "Decisions", open: openDecisions},
  index: {title: "Index", open: openIndex},
  tenants: {title: "Tenants", open: openTenants},
  policies: {title: "Policies", open: openDryRun},
  keys: {title: "Keys", open: openKeys},
  playground: {title: "Playground", open: openPlayground},
};
