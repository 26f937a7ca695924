"use strict";
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const { axis, brackets, cells, phases } = run;
  const names = Object.keys(phases);
  const diversities = [...new Set(cells.map((cell) => cell.chains))];
  const seeds = [...new Set(cells.map((cell) => cell.seed))];
  const byId = (id) => document.getElementById(id);
  const map = byId("map"), tip = byId("tip");
  const chooseChains = byId("choose-chains"), chooseSeed = byId("choose-seed");
  const chooseStep = byId("choose-step"), play = byId("play");

  // To begin with, the model that goes through the most phases.
  const turns = cells.map((cell) => (cell.steps ? cell.begins.length : -1));
  let chosen = turns.indexOf(Math.max(...turns));
  let cursor = null; // index of the step that is looked at

  // Everything is made of elements and text, so that no name in the data is ever read as markup.
  const make = (space) => (tag, attributes = {}, ...children) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const svg = make("http://www.w3.org/2000/svg"), html = make("http://www.w3.org/1999/xhtml");
  const count = (number) => number.toLocaleString("en");
  const nats = (value, digits = 3) => (value === null ? "–" : value.toPrecision(digits).replace("-", "−"));
  const title = (cell) => `K = ${cell.chains}` + (seeds.length > 1 ? `, seed ${cell.seed}` : "");
  const story = (cell) => {
    if (!cell.steps) return cell.outcome;
    const path = cell.begins.map(([phase, step]) => `${phase} from step ${count(step)}`);
    return (path.join(", ") || "no phase yet") + (cell.complete ? "" : `; ${cell.outcome}`);
  };
  const symbol = (name) => [name[0], svg("tspan", { dy: 3, "font-size": "9" }, name[1]), svg("tspan", { dy: -3 }, name[2])];

  // ---- phase map: a row for each cell, small K below ----
  let rows = [], x = null;

  function drawMap() {
    const several = seeds.length > 1;
    const labels = 8 * Math.max(...diversities.map((chains) => chains.length)) + 4;
    const left = labels + (several ? 42 : 10), right = 14 + 38 * (1 + Math.max(-1, ...brackets.map((bracket) => bracket.lane))), top = 24;
    // A page that opens in the background has no width yet.
    const width = Math.max(map.clientWidth, left + right + 100);
    const height = several ? Math.max(11, 24 - 2 * seeds.length) : 26, gap = several ? 1 : 2, apart = several ? 7 : 2;
    x = (at) => left + ((at - axis.range[0]) / (axis.range[1] - axis.range[0])) * (width - left - right);
    rows = [];
    let y = top;
    for (const chains of [...diversities].reverse()) {
      // Seeds read downwards within their K.
      cells.forEach((cell, index) => {
        if (cell.chains !== chains) return;
        rows[index] = y;
        y += height + gap;
      });
      y += apart - gap;
    }
    const bottom = y - apart + 6;
    const middle = {};
    for (const chains of diversities) {
      const ys = rows.filter((_, index) => cells[index].chains === chains);
      middle[chains] = (Math.min(...ys) + Math.max(...ys) + height) / 2;
    }
    const focused = document.activeElement === map.firstChild;
    const hatch = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("path", { d: "M0 0V5", class: "hatch-line" }));
    const figure = svg("svg", { height: bottom + 44, role: "listbox", tabindex: 0, "aria-label": "Phase map. Up and down choose a model, left and right move along its training." },
      svg("defs", {}, hatch),
      svg("text", { x: labels, y: 12, class: "quiet", "text-anchor": "end" }, "K"));
    if (several) figure.append(svg("text", { x: left - 8, y: 12, class: "quiet", "text-anchor": "end" }, "seed"));
    for (const chains of diversities)
      figure.append(svg("text", { x: labels, y: middle[chains] + 4, "text-anchor": "end" }, chains));
    cells.forEach((cell, index) => figure.append(mapRow(cell, index, height, several, left)));
    figure.append(stepAxis(bottom, width - right));
    for (const { name, low, high, lane } of brackets) {
      const at = width - right + 10 + 38 * lane;
      const from = low === null ? bottom - 4 : middle[low], to = high === null ? top - 4 : middle[high];
      // An end without a tick is open: no cell of the sweep lies beyond it.
      const d = `M${at} ${from}h${low === null ? 0 : -5}m${low === null ? 0 : 5} 0V${to}${high === null ? "" : "h-5"}`;
      figure.append(svg("g", { class: "bracket" }, svg("path", { d }),
        svg("text", { x: at + 6, y: (from + to) / 2 + 4 }, ...symbol(name))));
    }
    map.replaceChildren(figure);
    mark();
    if (focused) figure.focus();
  }

  function mapRow(cell, index, height, several, left) {
    const y = rows[index];
    const row = svg("g", { class: "row", id: `row-${index}`, role: "option", "data-cell": index, "aria-label": `${title(cell)}: ${story(cell)}` });
    if (several) row.append(svg("text", { x: left - 8, y: y + height / 2 + 4, class: "quiet", "font-size": Math.min(11, height), "text-anchor": "end" }, cell.seed));
    const span = (from, to) => ({ x: x(from).toFixed(2), y, width: (x(to) - x(from)).toFixed(2), height });
    // What training did not reach, or reached without a finite number.
    const broken = cell.steps ? cell.colours.indexOf(null) : 0, ends = broken < 0 ? cell.steps : broken;
    if (ends < axis.steps.length) {
      const box = span(axis.left[ends], axis.range[1]);
      row.append(svg("rect", { ...box, y: y + 0.5, height: height - 1, class: "absent" }));
      if (box.width > 7 * cell.outcome.length && height > 9)
        row.append(svg("text", { class: "quiet", x: +box.x + box.width / 2, y: y + height / 2 + 4, "text-anchor": "middle", "font-size": Math.min(12, height) }, cell.outcome));
    }
    for (let step = 0; step < cell.steps; step++) {
      const box = span(axis.left[step], axis.right[step]), phase = cell.phase[step], colour = cell.colours[step];
      const look = colour === null ? { class: "heat broken" } : phase === "none" ? { class: "heat no-phase" } : { class: "heat", fill: colour };
      row.append(svg("rect", { ...box, ...look, "data-step": step, "shape-rendering": "crispEdges" }));
      if (phase !== "none" && !cell.clear[step]) row.append(svg("rect", { ...box, class: "veil", fill: "url(#hatch)" }));
    }
    cell.begins.forEach(([phase, step], turn) => {
      const from = x(axis.left[axis.steps.indexOf(step)]);
      const next = cell.begins[turn + 1];
      const to = x(next ? axis.left[axis.steps.indexOf(next[1])] : axis.right[cell.steps - 1]);
      row.append(svg("path", { class: "boundary", d: `M${from} ${y}v${height}` }));
      if (to - from > 26 && height > 12)
        row.append(svg("text", { class: "name", x: (from + to) / 2, y: y + height / 2 + 4, "text-anchor": "middle", style: `fill: ${phases[phase].text}` }, phase));
    });
    return row;
  }

  function stepAxis(y, end) {
    const group = svg("g", { class: "axis" }, svg("path", { d: `M${x(axis.range[0])} ${y}H${end}` }));
    for (const at of axis.small) group.append(svg("path", { d: `M${x(at)} ${y}v3` }));
    let free = -Infinity;
    for (const { at, label } of axis.ticks) {
      group.append(svg("path", { d: `M${x(at)} ${y}v6` }));
      const half = 3.6 * label.length;
      if (x(at) - half < free) continue;
      group.append(svg("text", { x: x(at), y: y + 19, "text-anchor": "middle" }, label));
      free = x(at) + half + 4;
    }
    group.append(svg("text", { x: (x(axis.range[0]) + end) / 2, y: y + 38, "text-anchor": "middle" }, "optimizer steps"));
    return group;
  }

  function mark() {
    map.querySelectorAll(".chosen, .cursor").forEach((element) => element.remove());
    const figure = map.firstChild, row = byId(`row-${chosen}`);
    const box = row.querySelector("rect"), y = rows[chosen], height = +box.getAttribute("height") + (cells[chosen].steps ? 0 : 1);
    map.querySelectorAll(".row").forEach((other) => other.setAttribute("aria-selected", other === row));
    figure.setAttribute("aria-activedescendant", row.id);
    figure.append(svg("rect", { class: "chosen", x: x(axis.range[0]) - 2, y: y - 2, width: x(axis.range[1]) - x(axis.range[0]) + 4, height: height + 4, rx: 2 }));
    if (cursor !== null && cells[chosen].steps) {
      const from = x(axis.left[cursor]);
      figure.append(svg("rect", { class: "cursor", x: from - 1, y: y - 4, width: x(axis.right[cursor]) - from + 2, height: height + 8 }));
    }
  }

  // ---- what a cell of the map says ----
  function details(cell, step) {
    const phase = cell.phase[step], known = phase !== "none";
    const heading = known ? `${phase}, ${phases[phase].reference}${cell.clear[step] ? "" : " (unclear)"}` : "no phase";
    const lines = [html("p", { class: "title" }, heading),
      html("p", {}, `K = ${cell.chains}, seed ${cell.seed}, step ${count(axis.steps[step])}`),
      html("p", {}, `margin ${nats(cell.margin[step])} ± ${nats(cell.error[step], 1)} nats; OOD ${cell.ood[step] === "none" ? "no phase" : cell.ood[step]}`)];
    const table = html("table", {}, html("tr", {}, html("th", {}, ""), html("th", { class: "number" }, "share"), html("th", { class: "number" }, "ID, nats"), html("th", { class: "number" }, "OOD")));
    names.forEach((name, index) => {
      if (cell.composition[index][step] === null && cell.distance.id[index][step] === null) return;
      const share = cell.composition[index][step];
      table.append(html("tr", {}, html("th", {}, html("i", { class: "line", style: `border-color: ${phases[name].colour}` }), phases[name].reference),
        html("td", { class: "number" }, share === null ? "–" : `${Math.round(100 * share)} %`),
        html("td", { class: "number" }, nats(cell.distance.id[index][step])),
        html("td", { class: "number" }, nats(cell.distance.ood[index][step]))));
    });
    return [...lines, table, html("p", {}, `KL(model ‖ mixture) ${nats(cell.residual[step], 2)} nats`)];
  }

  function showTip(cell, step, near) {
    tip.replaceChildren(...details(cell, step));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const besides = near.x + 16 + width < document.documentElement.clientWidth ? near.x + 16 : near.x - 16 - width;
    tip.style.left = `${Math.max(8, besides)}px`;
    tip.style.top = `${Math.max(8, Math.min(near.y + 16, window.innerHeight - height - 8))}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  map.addEventListener("pointermove", (event) => {
    const heat = event.target.closest(".heat");
    if (!heat) return hideTip();
    showTip(cells[heat.parentNode.dataset.cell], +heat.dataset.step, { x: event.clientX, y: event.clientY });
  });
  map.addEventListener("pointerleave", hideTip);
  window.addEventListener("scroll", hideTip, { passive: true });
  map.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const heat = event.target.closest(".heat");
    choose(+row.dataset.cell, heat ? +heat.dataset.step : null);
    // A tap has no pointer that moves.
    if (heat) showTip(cells[chosen], +heat.dataset.step, { x: event.clientX, y: event.clientY });
  });
  document.addEventListener("pointerdown", hideTip);
  map.addEventListener("keydown", (event) => {
    const order = cells.map((_, index) => index).sort((a, b) => rows[a] - rows[b]);
    const place = order.indexOf(chosen), steps = cells[chosen].steps;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const next = order[place + (event.key === "ArrowUp" ? -1 : 1)];
      if (next !== undefined) choose(next);
    } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && steps) {
      look(cursor === null ? steps - 1 : cursor + (event.key === "ArrowLeft" ? -1 : 1));
    } else if (event.key === "Escape") {
      look(null);
    } else return;
    event.preventDefault();
    if (cursor === null || !cells[chosen].steps) return hideTip();
    const box = map.querySelector(".cursor").getBoundingClientRect();
    showTip(cells[chosen], cursor, { x: box.right, y: box.bottom });
  });

  // ---- curves ----
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function drawCurves() {
    const cell = cells[chosen];
    byId("story").replaceChildren(html("b", {}, title(cell)), `: ${story(cell)}`);
    byId("curves").hidden = !cell.steps;
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
    // The interesting part of the loss: from the best reference to a little above uniform, ln C.
    const known = losses.flatMap(({ y }) => y).filter((value) => value !== null);
    const least = Math.min(...known), most = Math.min(Math.max(...known), 1.08 * run.uniform), pad = 0.05 * (most - least) || 0.05;

    const layout = (yaxis) => ({
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
      ...phaseBand(cell),
    });
    const positive = distances.flatMap(({ y }) => y).filter((value) => value !== null);
    const decades = Math.log10(Math.max(...positive) / Math.min(...positive));
    const config = { displayModeBar: false, responsive: true };
    Plotly.react("distances", distances, layout({ type: "log", dtick: decades > 2 ? 1 : "D2", minor: { ticks: "outside", ticklen: 3, tickcolor: colour("muted") }, tickformat: "~g", title: { text: "nats", standoff: 4 } }), config);
    Plotly.react("losses", losses, layout({ range: [least - pad, most + pad], title: { text: "nats", standoff: 4 } }), config);
  }

  /** The row of the map again, as a band on top of a chart, and a line at the step that is looked at. */
  function phaseBand(cell) {
    const shapes = [], annotations = [];
    cell.begins.forEach(([phase, step], turn) => {
      const next = cell.begins[turn + 1];
      const x0 = axis.left[axis.steps.indexOf(step)], x1 = next ? axis.left[axis.steps.indexOf(next[1])] : axis.right[cell.steps - 1];
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 1.01, y1: 1.03, fillcolor: phases[phase].colour, line: { width: 0 } });
      if (turn) shapes.push({ type: "line", xref: "x", yref: "paper", x0, x1: x0, y0: 0, y1: 1.03, line: { color: colour("muted"), width: 1, dash: "dot" } });
      annotations.push({ xref: "x", yref: "paper", x: (x0 + x1) / 2, y: 1.03, yanchor: "bottom", text: phase, showarrow: false, font: { size: 11, color: colour("ink") } });
    });
    if (cursor !== null)
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: axis.at[cursor], x1: axis.at[cursor], y0: 0, y1: 1, line: { color: colour("ink"), width: 1.5 } });
    return { shapes, annotations };
  }

  // ---- choosing ----
  const plain = (cell) => cell.chains.replaceAll(",", "").replace("∞", "infinite");

  /** Look at a cell, and at one step of it where `step` is not null. */
  function choose(index, step = cursor) {
    chosen = index;
    const cell = cells[index];
    chooseChains.value = cell.chains;
    chooseSeed.value = String(cell.seed);
    chooseStep.max = Math.max(0, cell.steps - 1);
    chooseStep.disabled = play.disabled = !cell.steps;
    cursor = within(step);
    drawCurves();
    show();
  }

  /** Look at a step, by its place, of the chosen cell; with null at none. */
  function look(step) {
    cursor = within(step);
    if (cells[chosen].steps && byId("losses").data)
      for (const chart of ["distances", "losses"]) Plotly.relayout(chart, { shapes: phaseBand(cells[chosen]).shapes });
    show();
  }

  /** The place nearest to a step that the chosen cell has. */
  function within(step) {
    const last = cells[chosen].steps - 1;
    return step === null || last < 0 ? null : Math.max(0, Math.min(step, last));
  }

  /** Everything but the charts follows what is looked at. */
  function show() {
    const cell = cells[chosen], last = cell.steps - 1, at = cursor ?? last;
    chooseStep.value = at;
    byId("shown-step").textContent = last < 0 ? "" : count(axis.steps[at]);
    chooseStep.setAttribute("aria-valuetext", last < 0 ? "" : `step ${count(axis.steps[at])}, ${cell.phase[at]}`);
    byId("now").replaceChildren(...(last < 0 ? [] : details(cell, at)));
    mark();
    const seen = cursor === null ? "" : `&step=${axis.steps[cursor]}`;
    // Browsers refuse it where it is done too often.
    try { history.replaceState(null, "", `#K=${plain(cell)}&seed=${cell.seed}${seen}`); } catch { /* the next step may do */ }
  }

  /** The cell and the step that the address names, if it does. */
  function follow() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const index = cells.findIndex((cell) => plain(cell) === asked.get("K") && String(cell.seed) === (asked.get("seed") ?? String(seeds[0])));
    if (index < 0) return choose(chosen);
    const far = axis.steps.map((step) => Math.abs(step - asked.get("step")));
    choose(index, asked.has("step") ? far.indexOf(Math.min(...far)) : null);
  }

  // Played, a step stands for a sixth of a second.
  let playing = null;
  function stop() {
    clearInterval(playing);
    playing = null;
    play.textContent = "Play";
  }
  play.addEventListener("click", () => {
    if (playing !== null) return stop();
    const last = cells[chosen].steps - 1;
    look(cursor === null || cursor === last ? 0 : cursor);
    play.textContent = "Pause";
    playing = setInterval(() => {
      if (cursor === null || cursor >= cells[chosen].steps - 1) return stop();
      look(cursor + 1);
    }, 160);
  });
  chooseStep.addEventListener("input", () => { stop(); look(+chooseStep.value); });
  chooseChains.append(...diversities.map((chains) => html("option", {}, chains)));
  chooseSeed.append(...seeds.map((seed) => html("option", {}, seed)));
  byId("seed-label").hidden = seeds.length < 2;
  for (const select of [chooseChains, chooseSeed])
    select.addEventListener("change", () => {
      hideTip();
      const isChains = (cell) => cell.chains === chooseChains.value, isSeed = (cell) => String(cell.seed) === chooseSeed.value;
      const both = cells.findIndex((cell) => isChains(cell) && isSeed(cell));
      // A refined sweep has other K for each seed.
      choose(both >= 0 ? both : cells.findIndex(select === chooseChains ? isChains : isSeed));
    });
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());

  drawMap();
  follow();
  window.addEventListener("hashchange", follow);
  let width = map.clientWidth;
  new ResizeObserver(() => {
    if (map.clientWidth !== width) { width = map.clientWidth; drawMap(); }
  }).observe(map);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurves);
  // The curves wait for plotly.js, which comes last in the file so that the map need not.
  document.addEventListener("DOMContentLoaded", drawCurves);
})();
