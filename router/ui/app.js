// The dashboard: sign-in, the live stream, and which view is shown.

import {element} from "./dom.js";
import {VIEWS} from "./views.js";

const KEEP = 300;
const KEEP_DECISIONS = 200;
const $ = (id) => document.getElementById(id);

export const fleet = {state: null, history: [], decisions: [], key: null};
let shown = null;
let viewed = null;
let following = null;

export async function ask(path, {method = "GET", body = null, signal = null} = {}) {
  const answer = await fetch(path, {
    method, signal,
    headers: {authorization: `Bearer ${fleet.key}`, "content-type": "application/json"},
    body: body === null ? null : JSON.stringify(body),
  });
  const payload = await answer.json();
  if (!answer.ok) throw new Error(payload.error ? payload.error.message : `status ${answer.status}`);
  return payload;
}

function take(state) {
  fleet.state = state;
  fleet.history.push({
    at: state.at,
    active: Object.fromEntries(state.replicas.map((r) => [r.id, r.num_active])),
    waiting: state.num_waiting,
  });
  fleet.history.splice(0, fleet.history.length - KEEP);
  const known = new Set(fleet.decisions.map((r) => r.unique_id));
  const fresh = state.decisions.filter((r) => !known.has(r.unique_id)).reverse();
  fleet.decisions = [...fresh, ...fleet.decisions].slice(0, KEEP_DECISIONS);
  const live = state.replicas.filter((r) => r.live).length;
  $("summary").textContent =
    `${live} of ${state.replicas.length} replicas live · ${state.num_in_flight} in flight, ${state.num_waiting} waiting` +
    (state.index_reason ? ` · index: ${state.index_reason}` : "");
  if (shown && shown.update) shown.update();
}

async function follow() {
  following = new AbortController();
  const answer = await fetch("/admin/live", {
    headers: {authorization: `Bearer ${fleet.key}`}, signal: following.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  enter();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
  }
}

async function run() {
  for (;;) {
    try {
      await follow();
      $("summary").textContent = "The stream ended; connecting again …";
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!fleet.state) return leave(error.message);
      $("summary").textContent = `No connection (${error.message}); trying again …`;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

function enter() {
  sessionStorage.setItem("prefixfleet-key", fleet.key);
  $("sign-in").hidden = true;
  $("tabs").hidden = $("leave").hidden = false;
  if (!shown) show(location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "fleet");
}

function leave(message) {
  if (following) following.abort();
  sessionStorage.removeItem("prefixfleet-key");
  Object.assign(fleet, {state: null, history: [], decisions: [], key: null});
  shown = null;
  $("view").replaceChildren();
  $("summary").textContent = "";
  $("tabs").hidden = $("leave").hidden = true;
  $("sign-in").hidden = false;
  $("sign-in-error").textContent = message || "";
  $("key").focus();
}

function show(name) {
  viewed = name;
  location.hash = name;
  for (const tab of $("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    tab.tabIndex = tab.dataset.view === name ? 0 : -1;
  }
  const place = element("section", {role: "tabpanel", "aria-label": VIEWS[name].title});
  $("view").replaceChildren(place);
  shown = VIEWS[name].open(place);
  if (fleet.state && shown.update) shown.update();
}

function moveTab(event) {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  const tabs = [...$("tabs").children];
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  show(next.dataset.view);
  next.focus();
}

for (const [name, view] of Object.entries(VIEWS)) {
  const tab = element("button", {type: "button", role: "tab", on: {click: () => show(name)}}, view.title);
  tab.dataset.view = name;
  $("tabs").append(tab);
}
$("tabs").addEventListener("keydown", moveTab);
addEventListener("hashchange", () => {
  const name = location.hash.slice(1);
  if (shown && name in VIEWS && name !== viewed) show(name);
});
$("leave").addEventListener("click", () => leave());
$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  fleet.key = $("key").value.trim();
  $("key").value = "";
  run();
});
fleet.key = sessionStorage.getItem("prefixfleet-key");
if (fleet.key) run(); else leave();
