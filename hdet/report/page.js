(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll("[data-chart]")];
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const theme = () => read(dark.matches ? "theme-dark" : "theme-light");
  const small = () => window.innerWidth < 600;

  let linking = false;
  const link = (source, change) => {
    const range = change["xaxis.range[0]"] !== undefined
      ? { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] }
      : change["xaxis.autorange"] ? { "xaxis.autorange": true } : null;
    if (linking || !range) return;
    linking = true;  // the others' own events are answers, not questions
    Promise.all(charts.filter((chart) => chart !== source).map((chart) => Plotly.relayout(chart, range)))
      .finally(() => { linking = false; });
  };

  // A page that is served refreshes itself: what was zoomed in on is kept for as long as its tab is open.
  const served = window.location.protocol.startsWith("http");
  const zoomed = served ? JSON.parse(sessionStorage.getItem("hdet zoom")) : null;
  const keep = (change) => {
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] !== undefined) sessionStorage.setItem("hdet zoom", JSON.stringify(range));
    else if (change["xaxis.autorange"]) sessionStorage.removeItem("hdet zoom");
  };

  for (const chart of charts) {
    const { data, layout } = read(chart.dataset.chart);
    layout.template = theme();
    if (zoomed) layout.xaxis.range = zoomed;
    Plotly.newPlot(chart, data, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: small() ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  // none that sends the chart away
    });
    chart.on("plotly_relayout", (change) => link(chart, change));
    if (served) chart.on("plotly_relayout", keep);
  }
  dark.addEventListener("change", () => charts.forEach((chart) => Plotly.relayout(chart, { template: theme() })));
})();
