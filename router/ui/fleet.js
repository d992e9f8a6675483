// What is known of the fleet, and how it is asked: the key, single calls, and the live stream.

const KEEP = 300;
const KEEP_DECISIONS = 200;
const SILENT_MS = 10000;

export const fleet = {key: null, state: null, history: [], decisions: []};

// The key is wrong, no longer valid, or may not do this; asking again does not help.
export class Refused extends Error {}

async function call(path, options = {}) {
  const headers = {authorization: `Bearer ${fleet.key}`, "content-type": "application/json"};
  const answer = await fetch(path, {...options, headers});
  if (answer.ok) return answer;
  const {error} = await answer.json().catch(() => ({}));
  const Problem = [401, 403].includes(answer.status) ? Refused : Error;
  throw new Problem(error ? error.message : `status ${answer.status}`);
}

export async function ask(path, {method = "GET", body = null, signal = null} = {}) {
  return (await call(path, {method, signal, body: body === null ? null : JSON.stringify(body)})).json();
}

export function forget() {
  Object.assign(fleet, {key: null, state: null, history: [], decisions: []});
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
  fleet.decisions.push(...state.decisions.filter((r) => !known.has(r.unique_id)));
  fleet.decisions.sort((one, other) => other.at - one.at);
  fleet.decisions.splice(KEEP_DECISIONS);
}

// A look comes every two seconds: a connection without one is dead, whatever the browser thinks.
async function soon(promise) {
  let timer;
  const silence = new Promise((_, fail) => {
    timer = setTimeout(() => fail(new Error(`silent for ${SILENT_MS / 1000} s`)), SILENT_MS);
  });
  try {
    return await Promise.race([promise, silence]);
  } finally {
    clearTimeout(timer);
  }
}

// Take looks at the fleet, calling `looked` after each, until the stream ends, breaks or `signal` does.
export async function follow(signal, looked) {
  const connection = new AbortController();
  const end = () => connection.abort();
  signal.addEventListener("abort", end);
  try {
    const answer = await soon(call("/admin/live", {signal: connection.signal}));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const {value, done} = await soon(reader.read());
      if (done) return;
      buffer += value;
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        take(JSON.parse(event.slice(6)));
        queueMicrotask(looked); // What goes wrong in a view is no fault of the connection.
      }
    }
  } finally {
    signal.removeEventListener("abort", end);
    end();
  }
}
