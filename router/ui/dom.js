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

// Columns: {head, cell(row) -> text or node, number?}. `pick` makes rows open something.
export function table(columns, rows, {pick = null, empty = "Nothing yet."} = {}) {
  if (!rows.length) return element("p", {class: "note"}, empty);
  const head = columns.map((c) =>
    element("th", {class: c.number ? "number" : null, scope: "col"}, c.head));
  const body = rows.map((row) => {
    const cells = columns.map((c) =>
      element("td", {class: c.number ? "number" : null}, c.cell(row)));
    if (!pick) return element("tr", {}, cells);
    const open = () => pick(row);
    const onKey = (event) => { if (event.key === "Enter") open(); };
    return element("tr", {class: "pick", tabindex: "0", on: {click: open, keydown: onKey}}, cells);
  });
  return element("div", {class: "scroll"},
    element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

export function facts(pairs) {
  return element("dl", {}, pairs.map(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}

export function mark(text, kind) {
  return element("span", {class: kind}, text);
}

export const whole = (n) => n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en");
export const seconds = (s) => s === null || s === undefined ? "–"
  : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`;
export const share = (part, all) => all ? `${(100 * part / all).toFixed(1)} %` : "–";
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
