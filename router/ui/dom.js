// Builds elements out of text alone: nothing that comes from a fleet is ever read as HTML.

export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "on") {
      for (const [event, action] of Object.entries(value)) made.addEventListener(event, action);
    } else if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

// Columns: {head, cell(row) -> text or node, kind?}, a kind being "number" or "tight". `pick` makes
// rows open something; `key(row)` then tells them apart.
export function table(columns, rows, {pick = null, key = null, empty = "Nothing yet."} = {}) {
  if (!rows.length) return element("p", {class: "note"}, empty);
  const head = columns.map((c) => element("th", {class: c.kind, scope: "col"}, c.head));
  const body = rows.map((row) => {
    const cells = columns.map((c) => element("td", {class: c.kind}, c.cell(row)));
    if (!pick) return element("tr", {}, cells);
    const open = () => pick(row);
    const onKey = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); // Else it would press the button that what opens has in focus.
      open();
    };
    return element("tr", {class: "pick", tabindex: "0", "data-key": key(row), on: {click: open, keydown: onKey}}, cells);
  });
  return element("div", {class: "scroll"},
    element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

// Show something else in a place; focus and sideways scrolling stay where they are.
export function refill(place, ...nodes) {
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const scrolled = [...place.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  place.replaceChildren(...nodes);
  place.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = scrolled[i] || 0; });
  const again = focused && place.querySelector(`[data-key="${CSS.escape(focused)}"]`);
  if (again) again.focus({preventScroll: true});
}

export function facts(pairs) {
  return element("dl", {}, pairs.map(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}

// Give a select its options; what was chosen stays chosen while it is among them.
export function fill(select, names) {
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", {value: name}, name)));
  if (names.includes(chosen)) select.value = chosen;
}

export function mark(text, kind) {
  return element("span", {class: kind}, text);
}

export const whole = (n) => n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en");
export const seconds = (s) => s === null || s === undefined ? "–"
  : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`;
export const share = (part, all) => all ? `${(100 * part / all).toFixed(1)} %` : "–";
export const utc = (at) => new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ");
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
