// A policy tried on a tenant's recorded traffic: two replays, compared. It changes nothing.

import {bars, draw, sweep} from "./charts.js";
import {element, facts, fill, seconds, share, table, whole} from "./dom.js";
import {ask} from "./fleet.js";

const wordsOf = (policy, params) => [policy,
  ...Object.entries(params).map(([name, value]) => `${name}=${value}`)].join(" ");
const percent = (part) => share(part, 1);

function parameterFields(policy) {
  return Object.entries(policy.params).map(([name, value]) => element("label", {}, name, element("input",
    {type: "number", step: "any", "data-param": name, placeholder: String(value)})));
}

function paramsOf(place) {
  const given = [...place.querySelectorAll("[data-param]")].filter((input) => input.value !== "");
  return Object.fromEntries(given.map((input) => [input.dataset.param, Number(input.value)]));
}

const CHARTS = [
  ["Prompt tokens from a cache", {"this tenant": "token_hit", "all tenants": "fleet_token_hit"},
    {percent: true, text: percent}],
  ["Time to first token of this tenant", {p50: "ttft_p50_s", p99: "ttft_p99_s"}, {y: "seconds", text: seconds}],
  ["Computed tokens of the busiest replica", {"share of all": "busiest_share"}, {percent: true, text: percent}],
];

function drawAll(place, {now, then}, titles) {
  const drawings = CHARTS.map(() => element("div", {class: "chart"}));
  // All are in place before any is drawn: a chart takes the width that it finds.
  place.replaceChildren(...CHARTS.map(([title], i) =>
    element("figure", {}, element("figcaption", {}, title), drawings[i])));
  CHARTS.forEach(([, fields, options], i) => {
    const both = [now, then].map((run, j) => [titles[j], Object.values(fields).map((field) => run[field])]);
    draw(drawings[i], bars(Object.keys(fields), both, {text: options.text}), options);
  });
}

const ROWS = [
  ["prompt tokens from a cache", "token_hit", percent],
  ["the same of all tenants", "fleet_token_hit", percent],
  ["first token, p50", "ttft_p50_s", seconds],
  ["first token, p99", "ttft_p99_s", seconds],
  ["first token of all tenants, p99", "fleet_ttft_p99_s", seconds],
  ["busiest replica's share", "busiest_share", percent],
  ["requests shed", "shed", whole],
];

function outcome(found, declared) {
  const {now, then, fleet, tenant} = found;
  const titles = [`now: ${wordsOf(now.policy, now.params)}`, `then: ${wordsOf(then.policy, then.params)}`];
  const charts = element("div", {class: "charts"});
  const flags = Object.entries(then.params).map(([name, value]) => ` --param ${name}=${value}`).join("");
  const shown = element("div", {},
    element("h2", {}, "What it would change"),
    element("ul", {class: "sentences"}, found.sentences.map((line) => element("li", {}, line))),
    charts,
    table([
      {head: "", cell: ([name]) => name},
      {head: titles[0], cell: ([, field, text]) => now[field] === null ? "–" : text(now[field]), kind: "number"},
      {head: titles[1], cell: ([, field, text]) => then[field] === null ? "–" : text(then[field]), kind: "number"},
    ], ROWS),
    facts([
      ["replayed", `${whole(found.requests)} requests of ${tenant}, ${whole(found.recorded_rows)} of all`],
      ["on", `${whole(fleet.replicas)} replicas of ${whole(fleet.blocks)} blocks (${found.latency})`],
      ["to switch", declared ? "change its policy in the configuration file"
        : element("code", {}, `prefixfleet policy set ${tenant} ${then.policy}${flags}`)],
    ]));
  return {shown, draw: () => drawAll(charts, found, titles)};
}

// Show that something runs, for how long, and a way to end it; returns how to stop showing it.
function waiting(place, ending) {
  const text = element("span", {}, "0 s");
  const began = Date.now();
  const tick = setInterval(() => { text.textContent = `${Math.round((Date.now() - began) / 1000)} s`; }, 500);
  place.replaceChildren(
    element("p", {role: "status"}, "Replaying the recording, as it is and with the new policy …"),
    element("p", {class: "inline"}, element("progress", {"aria-label": "replaying"}), text,
      element("button", {type: "button", on: {click: () => ending.abort()}}, "Cancel")));
  return () => clearInterval(tick);
}

async function run(result, tenant, body, ending) {
  const stop = waiting(result, ending);
  sweep(); // The charts of the run before.
  try {
    const path = `/admin/tenants/${encodeURIComponent(tenant.tenant.name)}/policy/dry-run`;
    const found = await ask(path, {method: "POST", body, signal: ending.signal});
    const {shown, draw: drawCharts} = outcome(found, tenant.declared);
    result.replaceChildren(shown);
    drawCharts();
  } catch (error) {
    const text = error.name === "AbortError" ? "Cancelled; nothing has changed." : error.message;
    result.replaceChildren(element("p", {role: "alert", class: "bad"}, text));
  } finally {
    stop();
  }
}

export function openDryRun(place) {
  const tenant = element("select", {name: "tenant"});
  const policy = element("select", {name: "policy"});
  const params = element("div", {class: "fields"});
  const current = element("p", {class: "note"});
  const result = element("div", {class: "result"});
  const start = element("button", {type: "submit", class: "primary", disabled: true}, "Try it");
  let known = null;
  let tenants = [];
  let ending = new AbortController();

  const chosen = () => tenants.find((shown) => shown.tenant.name === tenant.value);
  const showCurrent = () => {
    const {policy: own, policy_params: given} = chosen().tenant;
    current.textContent = own ? `Placed by ${wordsOf(own, given)} now.`
      : `Placed by the default now: ${wordsOf(known.default, known.default_params)}.`;
  };
  const showParams = () => params.replaceChildren(
    ...parameterFields(known.policies.find((one) => one.name === policy.value)));
  tenant.addEventListener("change", showCurrent);
  policy.addEventListener("change", showParams);
  place.append(
    element("p", {class: "note"}, "Try a policy on what a tenant's traffic really was. It changes nothing."),
    element("form", {on: {submit: async (event) => {
      event.preventDefault();
      start.disabled = true;
      ending = new AbortController();
      await run(result, chosen(), {policy: policy.value, params: paramsOf(params)}, ending);
      start.disabled = false;
    }}}, element("label", {}, "Tenant", tenant), current, element("label", {}, "Policy", policy), params, start),
    result);

  async function load() {
    const [policies, shown] = await Promise.all([ask("/admin/policies"), ask("/admin/tenants")]);
    known = policies;
    tenants = shown.tenants;
    fill(tenant, tenants.map((one) => one.tenant.name));
    fill(policy, known.policies.map((one) => one.name));
    if (!tenants.length) throw new Error("There is no tenant yet.");
    showCurrent();
    showParams();
    start.disabled = false;
  }

  load().catch((error) => result.replaceChildren(element("p", {role: "alert", class: "bad"}, error.message)));
  return {close: () => ending.abort()};
}
