(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll("[data-chart]")];
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const theme = () => read(dark.matches ? "theme-dark" : "theme-light");
  const small = () => window.innerWidth < 600;

  // One chart a task, those in view first: a page of many charts answers while the rest follows.
  const due = new Map();
  let working = false;
  const inView = (chart) => {
    const { top, bottom } = chart.getBoundingClientRect();
    return bottom > 0 && top < window.innerHeight;
  };
  const work = () => {
    const [next] = due.keys();
    working = next !== undefined;
    if (!working) return;
    const chart = [...due.keys()].find(inView) ?? next;
    const task = due.get(chart);
    due.delete(chart);
    Promise.resolve(task()).finally(() => setTimeout(work));
  };
  const soon = (chart, task) => {
    const before = due.get(chart);
    due.set(chart, before ? () => Promise.resolve(before()).then(task) : task);
    if (!working) work();
  };

  // A page that is served refreshes itself: what was zoomed in on is kept for as long as its tab is open.
  const served = window.location.protocol.startsWith("http");
  const zoomed = served ? JSON.parse(sessionStorage.getItem("hdet zoom")) : null;
  let whole = null;  // the steps that all charts show at first
  let shared = null;  // those that they show now
  const same = (one, other) => String(one) === String(other);
  const link = (source, change) => {
    if (!Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
    const range = [...source.layout.xaxis.range];
    if (same(range, shared)) return;  // an answer to the change of another
    shared = range;
    for (const chart of charts) {
      if (chart !== source) soon(chart, () => same(range, shared) && Plotly.relayout(chart, { "xaxis.range": [...range] }));
    }
    if (served && same(range, whole)) sessionStorage.removeItem("hdet zoom");
    else if (served) sessionStorage.setItem("hdet zoom", JSON.stringify(range));
  };

  const draw = (chart) => {
    const { data, layout } = read(chart.dataset.chart);
    layout.template = theme();
    whole ??= layout.xaxis.range;
    shared ??= zoomed ?? whole;
    layout.xaxis.range = [...shared];
    return Plotly.newPlot(chart, data, layout, {
      responsive: true,
      displaylogo: false,
      typesetMath: false,  // "$" in a name is a letter
      displayModeBar: small() ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  // none that sends the chart away
    }).then(() => chart.on("plotly_relayout", (change) => link(chart, change)));
  };
  charts.forEach((chart) => soon(chart, () => draw(chart)));
  dark.addEventListener("change", () => {
    charts.forEach((chart) => soon(chart, () => Plotly.relayout(chart, { template: theme() })));
  });
})();
