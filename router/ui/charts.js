// Charts by plotly, if its script is there; a view works without one.

function style() {
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return {ink: of("--ink"), line: of("--line"), page: of("--page")};
}

export function draw(place, traces, {y = "", stacked = false} = {}) {
  if (!window.Plotly) {
    place.textContent = "Charts need plotly on the gateway: pip install 'prefixfleet[ui]'.";
    return;
  }
  const {ink, line, page} = style();
  const axis = {gridcolor: line, zerolinecolor: line, automargin: true};
  window.Plotly.react(place, traces, {
    margin: {l: 50, r: 10, t: 10, b: 40},
    paper_bgcolor: page, plot_bgcolor: page, font: {color: ink, size: 12},
    barmode: stacked ? "stack" : "group",
    xaxis: axis, yaxis: {...axis, title: {text: y}, rangemode: "tozero"},
    legend: {orientation: "h"},
  }, {displayModeBar: false, responsive: true});
}

export function lines(series) {
  return [...series].map(([name, points]) => ({
    type: "scatter", mode: "lines", name,
    x: points.map(([at]) => new Date(at * 1000)), y: points.map(([, value]) => value),
  }));
}

export function bars(names, groups) {
  return groups.map(([name, values]) => ({type: "bar", name, x: names, y: values}));
}
