// Charts by plotly, if its script is there; a view works without one.

const drawn = new Map();

function style() {
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return {
    ink: of("--ink"), line: of("--line"), page: of("--page"),
    colours: [1, 2, 3, 4, 5, 6].map((number) => of(`--series-${number}`)),
  };
}

const date = (at) => new Date(at * 1000);

// Plotly reads some tags in names; what comes from a fleet is to be text.
const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

export function draw(place, traces, options = {}) {
  if (!window.Plotly) {
    place.textContent = "Charts need plotly on the gateway: pip install 'prefixfleet[ui]'.";
    return;
  }
  drawn.set(place, [traces, options]);
  const {y = "", percent = false, seconds = null} = options;
  const {ink, line, page, colours} = style();
  const axis = {gridcolor: line, zerolinecolor: line, automargin: true};
  window.Plotly.react(place, traces, {
    margin: {l: 50, r: 10, t: 10, b: 40},
    paper_bgcolor: page, plot_bgcolor: page, font: {color: ink, size: 12}, colorway: colours,
    barmode: "group",
    xaxis: seconds ? {...axis, type: "date", range: seconds.map(date), tickformat: "%H:%M:%S", nticks: 5}
      : {...axis, type: "category"},
    yaxis: {...axis, title: {text: y}, rangemode: "tozero", ...(percent ? {tickformat: ".0%", range: [0, 1]} : {})},
    showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
  }, {displayModeBar: false, responsive: true});
}

export function lines(series) {
  return [...series].map(([name, points]) => ({
    type: "scatter", mode: "lines", name: plain(name),
    x: points.map(([at]) => date(at)), y: points.map(([, value]) => value),
  }));
}

export function bars(names, groups, {text = null} = {}) {
  return groups.map(([name, values]) => ({
    type: "bar", name: plain(name), x: names.map(plain), y: values,
    ...(text ? {text: values.map(text), textposition: "auto"} : {}),
  }));
}

// Have plotly let go of charts that are no longer on the page: it listens for the window's size.
export function sweep() {
  for (const place of [...drawn.keys()].filter((one) => !one.isConnected)) {
    window.Plotly.purge(place);
    drawn.delete(place);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  sweep();
  for (const [place, [traces, options]] of drawn) draw(place, traces, options);
});
