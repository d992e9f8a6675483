// The dashboard's frame: sign-in, whether the fleet is followed, and which view is shown.

import {sweep} from "./charts.js";
import {element} from "./dom.js";
import {fleet, follow, forget, Refused} from "./fleet.js";
import {VIEWS} from "./views.js";

const RETRY_MS = 2000;
const STORED_KEY = "prefixfleet-key";
const $ = (id) => document.getElementById(id);

let session = null;
let shown = null;
let viewed = null;

function looked() {
  const {replicas, num_in_flight, num_waiting, index_reason} = fleet.state;
  const live = replicas.filter((r) => r.live).length;
  $("summary").textContent =
    `${live} of ${replicas.length} replicas live · ${num_in_flight} in flight, ${num_waiting} waiting` +
    (index_reason ? ` · index: ${index_reason}` : "");
  tell("");
  if (!shown) enter();
  else if (shown.update) shown.update();
}

// Say what is wrong with the connection; what is shown meanwhile is of before.
function tell(trouble) {
  if ($("connection").textContent !== trouble) $("connection").textContent = trouble;
  $("view").classList.toggle("stale", trouble !== "");
}

async function run(key) {
  if (session) session.abort();
  const {signal} = session = new AbortController();
  fleet.key = key;
  while (!signal.aborted) {
    let trouble = "The stream ended";
    try {
      await follow(signal, looked);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        leave(error.message);
        return;
      }
      trouble = `No connection (${error.message})`;
    }
    tell(`${trouble}; trying again …`);
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function enter() {
  sessionStorage.setItem(STORED_KEY, fleet.key);
  $("sign-in").hidden = true;
  $("tabs").hidden = $("leave").hidden = false;
  const wanted = location.hash.slice(1);
  show(wanted in VIEWS ? wanted : "fleet");
}

function leave(message = "") {
  if (session) session.abort();
  close();
  sessionStorage.removeItem(STORED_KEY);
  forget();
  tell("");
  $("summary").textContent = "";
  $("tabs").hidden = $("leave").hidden = true;
  $("sign-in").hidden = false;
  $("sign-in-error").textContent = message;
  $("key").focus();
}

// End the view that is shown, and what it has opened.
function close() {
  if (shown && shown.close) shown.close();
  shown = null;
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  $("view").replaceChildren();
  sweep();
}

function show(name) {
  close();
  viewed = name;
  location.hash = name;
  for (const tab of $("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    tab.tabIndex = tab.dataset.view === name ? 0 : -1;
  }
  const place = element("section", {role: "tabpanel", "aria-label": VIEWS[name].title});
  $("view").append(place);
  shown = VIEWS[name].open(place);
  if (shown.update) shown.update();
}

function moveTab(event) {
  const tabs = [...$("tabs").children];
  const here = tabs.indexOf(event.target);
  const there = {ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: -1}[event.key];
  if (there === undefined) return;
  event.preventDefault();
  const next = tabs.at(there % tabs.length);
  show(next.dataset.view);
  next.focus();
}

function signIn(event) {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  $("sign-in-error").textContent = "";
  if (/^[\x21-\x7e]+$/.test(key)) run(key);
  else leave("A key has neither blanks nor letters beyond ASCII.");
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
$("sign-in").addEventListener("submit", signIn);
const stored = sessionStorage.getItem(STORED_KEY);
if (stored) run(stored); else leave();
