/** The charts of a run along training; returns `draw(cell, step)` and `look(cell, step)`, which only moves the step. */
function trainingCurves({ axis, phases, uniform }) {
  const charts = ["distances", "composition", "losses"];
  const names = Object.keys(phases);

  function draw(cell, step) {
    if (!cell.steps || !window.Plotly) return;
    const at = axis.at.slice(0, cell.steps), steps = axis.steps.slice(0, cell.steps).map(count);
    const curve = (name, y, line) => ({
      name, y, line, x: at, customdata: steps, mode: cell.steps > 1 ? "lines" : "markers", marker: { color: line.color },
      hovertemplate: "%{y:.3g}", connectgaps: false,
    });
    const sets = { id: ["ID", "solid"], ood: ["OOD", "dot"] };
    const distances = [], losses = [];
    for (const [set, [label, dash]] of Object.entries(sets)) {
      names.forEach((name, index) => {
        const { colour: color, reference } = phases[name], distance = cell.distance[set][index], loss = cell.reference[set][index];
        if (distance.some((value) => value !== null))
          distances.push(curve(`${reference}, ${label}`, distance.map((value) => (value > 0 ? value : null)), { color, dash, width: set === "id" ? 2.2 : 1.6 }));
        if (loss !== null)
          losses.push(curve(`${reference}, ${label}`, at.map(() => loss), { color, dash, width: set === "id" ? 1.4 : 1.1 }));
      });
      losses.push(curve(`model, ${label}`, cell.loss[set], { color: colour("ink"), dash, width: set === "id" ? 2.4 : 1.8 }));
    }
    const shares = names.flatMap((name, index) => cell.composition[index].some((share) => share !== null) ? [{
      ...curve(phases[name].reference, cell.composition[index], { color: phases[name].colour, width: 0.5 }),
      stackgroup: "composition", fillcolor: phases[name].colour, hovertemplate: "%{y:.0%}",
    }] : []);
    // The interesting part of the loss: from the best reference to a little above uniform, ln C.
    const known = losses.flatMap(({ y }) => y).filter((value) => value !== null);
    const least = Math.min(...known), most = Math.min(Math.max(...known), 1.08 * uniform), pad = 0.05 * (most - least) || 0.05;
    const positive = distances.flatMap(({ y }) => y).filter((value) => value !== null);
    const decades = Math.log10(Math.max(...positive) / Math.min(...positive));
    const config = { displayModeBar: false, responsive: true };
    const nats = { title: { text: "nats", standoff: 4 } };
    Plotly.react("distances", distances, layout(cell, step, { ...nats, type: "log", dtick: decades > 2 ? 1 : "D2", minor: { ticks: "outside", ticklen: 3, tickcolor: colour("muted") }, tickformat: "~g" }), config);
    Plotly.react("composition", shares, layout(cell, step, { range: [0, 1], tickformat: ".0%", title: { text: "share", standoff: 4 } }), config);
    Plotly.react("losses", losses, layout(cell, step, { ...nats, range: [least - pad, most + pad] }), config);
  }

  function layout(cell, step, yaxis) {
    return {
      margin: { l: 56, r: 8, t: 24, b: 46 }, showlegend: false, hovermode: "x unified",
      dragmode: matchMedia("(hover: hover)").matches ? "zoom" : false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("muted") },
      hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("muted"), font: { color: colour("ink"), size: 12 } },
      xaxis: {
        range: axis.range, tickvals: axis.ticks.map((tick) => tick.at), ticktext: axis.ticks.map((tick) => tick.label), tickangle: 0,
        minor: { tickvals: axis.small, ticks: "outside", ticklen: 3, tickcolor: colour("muted") }, ticks: "outside", ticklen: 5,
        tickcolor: colour("muted"), showgrid: false, zeroline: false, linecolor: colour("muted"), title: { text: "optimizer steps", standoff: 8 },
        unifiedhovertitle: { text: "step %{customdata}" }, showspikes: false,
      },
      yaxis: { gridcolor: colour("rule"), zeroline: false, linecolor: colour("muted"), ticks: "outside", ticklen: 5, tickcolor: colour("muted"), ...yaxis },
      ...phaseBand(cell, step),
    };
  }

  /** The row of the map again, as a band on top of a chart, and a line at the step that is looked at. */
  function phaseBand(cell, step) {
    const shapes = [], annotations = [];
    cell.begins.forEach(([phase, begin], turn) => {
      const next = cell.begins[turn + 1];
      const x0 = axis.left[axis.steps.indexOf(begin)], x1 = next ? axis.left[axis.steps.indexOf(next[1])] : axis.right[cell.steps - 1];
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 1.01, y1: 1.03, fillcolor: phases[phase].colour, line: { width: 0 } });
      if (turn) shapes.push({ type: "line", xref: "x", yref: "paper", x0, x1: x0, y0: 0, y1: 1.03, line: { color: colour("muted"), width: 1, dash: "dot" } });
      annotations.push({ xref: "x", yref: "paper", x: (x0 + x1) / 2, y: 1.03, yanchor: "bottom", text: phase, showarrow: false, font: { size: 11, color: colour("ink") } });
    });
    if (step !== null)
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: axis.at[step], x1: axis.at[step], y0: 0, y1: 1, line: { color: colour("ink"), width: 1.5 } });
    return { shapes, annotations };
  }

  function look(cell, step) {
    if (cell.steps && byId("losses").data)
      for (const chart of charts) Plotly.relayout(chart, { shapes: phaseBand(cell, step).shapes });
  }

  return { draw, look };
}
