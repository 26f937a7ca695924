/**
 * The phase map of a run in `root`: a row for each cell, small K below.
 *
 * `look(cell, step)` hears of the cell, and of the place of the step or null, that are chosen in it;
 * `mark(cell, step)`, which is returned, shows a choice.
 */
function phaseMap(root, run, look) {
  const { axis, brackets, cells, phases } = run;
  const diversities = run.diversities ?? [...new Set(cells.map((cell) => cell.chains))];
  const seeds = [...new Set(cells.map((cell) => cell.seed))], several = seeds.length > 1;
  const title = (cell) => `K = ${cell.chains}` + (several ? `, seed ${cell.seed}` : "");
  const lanes = 1 + Math.max(-1, ...brackets.map((bracket) => bracket.lane));
  let rows = [], x = null, marked = { cell: 0, step: null };

  function draw() {
    const labels = 8 * Math.max(...diversities.map((chains) => chains.length)) + 4;
    const left = labels + (several ? 42 : 10), right = 14 + 38 * lanes, top = 24;
    // A page that opens in the background has no width yet.
    const width = Math.max(root.clientWidth, left + right + 100);
    const height = several ? Math.max(11, 24 - 2 * seeds.length) : 26, gap = several ? 1 : 2, apart = several ? 7 : 2;
    x = (at) => left + ((at - axis.range[0]) / (axis.range[1] - axis.range[0])) * (width - left - right);
    rows = [];
    const middle = {};
    let y = top;
    for (const chains of [...diversities].reverse()) {
      const from = y;
      // Seeds read downwards within their K.
      cells.forEach((cell, index) => {
        if (cell.chains !== chains) return;
        rows[index] = y;
        y += height + gap;
      });
      if (y === from) y += height + gap; // this run has no such K, others beside it have
      middle[chains] = (from + y - gap) / 2;
      y += apart - gap;
    }
    const bottom = y - apart + 6;
    const focused = document.activeElement === root.firstChild;
    const hatch = svg("pattern", { id: `${root.id}-hatch`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("path", { d: "M0 0V5", class: "hatch-line" }));
    const figure = svg("svg", { height: bottom + 44, role: "listbox", tabindex: 0, "aria-label": "Phase map. Up and down choose a model, left and right move along its training." },
      svg("defs", {}, hatch),
      svg("text", { x: labels, y: 12, class: "quiet", "text-anchor": "end", "aria-hidden": true }, "K"));
    const quiet = svg("g", { "aria-hidden": true });
    if (several) quiet.append(svg("text", { x: left - 8, y: 12, class: "quiet", "text-anchor": "end" }, "seed"));
    for (const chains of diversities)
      quiet.append(svg("text", { x: labels, y: middle[chains] + 4, "text-anchor": "end" }, chains));
    figure.append(quiet);
    cells.forEach((cell, index) => figure.append(row(cell, index, height, left)));
    figure.append(stepAxis(bottom, width - right));
    for (const bracket of brackets) figure.append(threshold(bracket, middle, width - right + 10 + 38 * bracket.lane, top - 4, bottom - 4));
    root.replaceChildren(figure);
    mark(marked.cell, marked.step);
    if (focused) figure.focus();
  }

  function row(cell, index, height, left) {
    const y = rows[index];
    const group = svg("g", { class: "row", id: `${root.id}-row-${index}`, role: "option", "data-cell": index, "aria-label": `${title(cell)}: ${story(cell)}` });
    if (several) group.append(svg("text", { x: left - 8, y: y + height / 2 + 4, class: "quiet", "font-size": Math.min(11, height), "text-anchor": "end" }, cell.seed));
    const span = (from, to) => ({ x: x(from).toFixed(2), y, width: (x(to) - x(from)).toFixed(2), height });
    // What training did not reach, or reached without a finite number.
    const broken = cell.steps ? cell.colours.indexOf(null) : 0, ends = broken < 0 ? cell.steps : broken;
    if (ends < axis.steps.length) {
      const box = span(axis.left[ends], axis.range[1]);
      group.append(svg("rect", { ...box, y: y + 0.5, height: height - 1, class: "absent" }));
      if (box.width > 7 * cell.outcome.length && height > 9)
        group.append(svg("text", { class: "quiet", x: +box.x + box.width / 2, y: y + height / 2 + 4, "text-anchor": "middle", "font-size": Math.min(12, height) }, cell.outcome));
    }
    for (let step = 0; step < cell.steps; step++) {
      const box = span(axis.left[step], axis.right[step]), phase = cell.phase[step], fill = cell.colours[step];
      const looks = fill === null ? { class: "heat broken" } : phase === "none" ? { class: "heat no-phase" } : { class: "heat", fill };
      group.append(svg("rect", { ...box, ...looks, "data-step": step, "shape-rendering": "crispEdges" }));
      if (phase !== "none" && !cell.clear[step]) group.append(svg("rect", { ...box, class: "veil", fill: `url(#${root.id}-hatch)` }));
    }
    cell.begins.forEach(([phase, step], turn) => {
      const from = x(axis.left[axis.steps.indexOf(step)]);
      const next = cell.begins[turn + 1];
      const to = x(next ? axis.left[axis.steps.indexOf(next[1])] : axis.right[cell.steps - 1]);
      group.append(svg("path", { class: "boundary", d: `M${from} ${y}v${height}` }));
      if (to - from > 26 && height > 12)
        group.append(svg("text", { class: "name", x: (from + to) / 2, y: y + height / 2 + 4, "text-anchor": "middle", style: `fill: ${phases[phase].text}` }, phase));
    });
    return group;
  }

  function stepAxis(y, end) {
    const group = svg("g", { class: "axis", "aria-hidden": true }, svg("path", { d: `M${x(axis.range[0])} ${y}H${end}` }));
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

  /** The K between which a threshold lies, and its fitted value with the interval. */
  function threshold({ name, low, high, fit }, middle, at, top, bottom) {
    const from = low === null ? bottom : middle[low], to = high === null ? top : middle[high];
    // An end without a tick is open: no cell of the sweep lies beyond it.
    const d = `M${at} ${from}h${low === null ? 0 : -5}m${low === null ? 0 : 5} 0V${to}${high === null ? "" : "h-5"}`;
    const group = svg("g", { class: "bracket", "aria-hidden": true }, svg("path", { d }),
      svg("text", { x: at + 6, y: (from + to) / 2 + 4 }, ...symbol(name)));
    if (!fit.length) return group;
    // Between the rows of two K, ln K is read off along the height.
    const known = diversities.filter((chains) => chains !== "∞").map((chains) => [Math.log(+chains.replaceAll(",", "")), middle[chains]]);
    const height = (value) => {
      if (value === null) return null;
      const after = known.findIndex(([log]) => log >= Math.log(value));
      if (after <= 0) return after < 0 ? top : known[0][1];
      const [[left, lower], [right, upper]] = [known[after - 1], known[after]];
      return lower + ((Math.log(value) - left) / (right - left)) * (upper - lower);
    };
    const [value, least, most] = fit.map(height);
    group.append(svg("path", { class: "interval", d: `M${at} ${least ?? bottom}V${most ?? top}` }));
    if (value !== null) group.append(svg("circle", { cx: at, cy: value, r: 3.2 }));
    return group;
  }

  /** The place nearest to a step that a cell has. */
  const within = (cell, step) => (step === null || !cells[cell].steps ? null : Math.max(0, Math.min(step, cells[cell].steps - 1)));

  function mark(cell, asked) {
    const step = within(cell, asked);
    marked = { cell, step };
    root.querySelectorAll(".chosen, .cursor").forEach((element) => element.remove());
    const figure = root.firstChild, chosen = byId(`${root.id}-row-${cell}`);
    if (!chosen) return;
    const box = chosen.querySelector("rect"), y = rows[cell], height = +box.getAttribute("height") + (cells[cell].steps ? 0 : 1);
    root.querySelectorAll(".row").forEach((other) => other.setAttribute("aria-selected", other === chosen));
    figure.setAttribute("aria-activedescendant", chosen.id);
    figure.append(svg("rect", { class: "chosen", x: x(axis.range[0]) - 2, y: y - 2, width: x(axis.range[1]) - x(axis.range[0]) + 4, height: height + 4, rx: 2 }));
    if (step !== null && cells[cell].steps) {
      const from = x(axis.left[step]);
      figure.append(svg("rect", { class: "cursor", x: from - 1, y: y - 4, width: x(axis.right[step]) - from + 2, height: height + 8 }));
    }
  }

  root.addEventListener("pointermove", (event) => {
    const heat = event.target.closest(".heat");
    if (!heat) return hideTip();
    showTip({ x: event.clientX, y: event.clientY }, ...details(run, cells[heat.parentNode.dataset.cell], +heat.dataset.step));
  });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("click", (event) => {
    const chosen = event.target.closest(".row");
    if (!chosen) return;
    const heat = event.target.closest(".heat"), cell = +chosen.dataset.cell;
    look(cell, heat ? +heat.dataset.step : null);
    // A tap has no pointer that moves.
    if (heat) showTip({ x: event.clientX, y: event.clientY }, ...details(run, cells[cell], +heat.dataset.step));
  });
  root.addEventListener("keydown", (event) => {
    const order = cells.map((_, index) => index).sort((a, b) => rows[a] - rows[b]);
    const { cell, step } = marked, last = cells[cell].steps - 1;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const next = order[order.indexOf(cell) + (event.key === "ArrowUp" ? -1 : 1)];
      if (next !== undefined) look(next, within(next, step));
    } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && last >= 0) {
      look(cell, step === null ? last : within(cell, step + (event.key === "ArrowLeft" ? -1 : 1)));
    } else if (event.key === "Escape") {
      look(cell, null);
    } else return;
    event.preventDefault();
    if (marked.step === null || !cells[marked.cell].steps) return hideTip();
    const box = root.querySelector(".cursor").getBoundingClientRect();
    showTip({ x: box.right, y: box.bottom }, ...details(run, cells[marked.cell], marked.step));
  });

  draw();
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (root.clientWidth !== width) { width = root.clientWidth; draw(); }
  }).observe(root);
  return mark;
}
