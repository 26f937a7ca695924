/** The circuit as a graph from input to output: an edge is as wide as its effect, those that were cut are grey. */
function circuitGraph(senders, edges, kl, kept, tint) {
  const ports = { q: -20, k: 0, v: 20 };
  const columns = [...new Set([...senders, "out"].map((node) => node.split(".")[0]))];
  const width = 110 * columns.length, place = {};
  columns.forEach((column, turn) => {
    const inside = [...senders, "out"].filter((node) => node.split(".")[0] === column);
    inside.forEach((node, row) => { place[node] = { x: 55 + 110 * turn, y: 150 + 130 * (row - (inside.length - 1) / 2) }; });
  });
  const ys = Object.values(place).map(({ y }) => y), top = Math.min(...ys) - 140, bottom = Math.max(...ys) + 140;
  const figure = svg("svg", { viewBox: `0 ${top} ${width} ${bottom - top}`, role: "img", "aria-label": `Circuit: ${edges.filter((_, edge) => kept[edge]).join(", ")}` });
  const most = Math.max(...kl, 1e-12);
  const order = edges.map((_, edge) => edge).sort((a, b) => kept[a] - kept[b]);
  for (const edge of order) {
    const [source, receiver] = edges[edge].split("->");
    const [head, port] = receiver in place ? [receiver, ""] : [receiver.slice(0, -2), receiver.slice(-1)];
    const end = { x: place[head].x - 34, y: place[head].y + (ports[port] ?? 0) };
    let d;
    if (source === "lag") d = `M${place[head].x} ${place[head].y - 62}V${place[head].y - 32}`;
    else {
      const start = { x: place[source].x + 30, y: place[source].y }, far = end.x - start.x;
      // A long edge goes round the components between: above them to q, k and out, below to the rest.
      const bend = far < 60 ? 0 : (["q", "k"].includes(port) || head === "out" ? -1 : 1) * (22 + 0.22 * far);
      d = `M${start.x} ${start.y}C${start.x + far / 3} ${start.y + bend * 1.3} ${end.x - far / 3} ${end.y + bend * 1.3} ${end.x} ${end.y}`;
    }
    figure.append(svg("path", { d, fill: "none", "stroke-linecap": "round", "stroke-width": (0.8 + 7 * Math.sqrt(Math.max(0, kl[edge]) / most)).toFixed(2),
      stroke: kept[edge] ? tint : "var(--none)", class: kept[edge] ? "kept" : "" }, svg("title", {}, `${edges[edge]}: ${nats(Math.max(0, kl[edge]), 2)} nats`)));
  }
  for (const [node, { x, y }] of Object.entries(place)) {
    figure.append(svg("rect", { x: x - 30, y: y - 30, width: 60, height: 60, rx: 6, class: "node" }), svg("text", { x: x + (node.startsWith("att") ? 5 : 0), y: y + 4, "text-anchor": "middle" }, node));
    if (node.startsWith("att"))
      for (const [port, lift] of Object.entries(ports)) figure.append(svg("text", { x: x - 26, y: y + lift + 4, class: "quiet", "font-size": 10 }, port));
    if (edges.includes(`lag->${node}`)) figure.append(svg("text", { x, y: y - 68, class: "quiet", "text-anchor": "middle" }, "lag"));
  }
  return figure;
}

/** The effect of every edge along training, darker where stronger, kept ones dotted, and as bars at a traced step. */
function edgeEffects({ arrays, edges, phases: named }, chosen, axis, phases) {
  const steps = arrays["trace.step"].data, kl = arrays["trace.kl"].data, kept = arrays["trace.circuit"].data;
  const left = 118, width = 430, bars = left + width + 16, row = 15, number = edges.length, height = row * number;
  const most = kl.reduce((one, other) => Math.max(one, other), 1e-12), strongest = Math.max(...kl.subarray(chosen * number, (chosen + 1) * number), 1e-12);
  const x = (at) => left + (width * (at - axis.range[0])) / (axis.range[1] - axis.range[0]);
  const figure = svg("svg", { viewBox: `0 0 ${bars + 170} ${height + 62}`, role: "img", "aria-label": "Effect of each edge along training, and at the step that is looked at" },
    svg("text", { x: bars, y: 12, class: "quiet" }, `step ${count(steps[chosen])}, nats`), svg("rect", { x: left, y: 20, width, height, class: "frame" }));
  edges.forEach((edge, line) => {
    const y = 20 + row * line;
    figure.append(svg("text", { x: left - 6, y: y + 11, "text-anchor": "end", class: "edge" }, edge));
    steps.forEach((step, turn) => {
      const place = axis.steps.indexOf(step), from = x(axis.left[place]), to = x(axis.right[place]), value = Math.max(0, kl[turn * number + line]);
      figure.append(svg("rect", { x: from.toFixed(1), y, width: (to - from).toFixed(1), height: row, fill: "var(--ink)", "fill-opacity": (0.85 * Math.sqrt(value / most)).toFixed(3) },
        svg("title", {}, `${edge}, step ${count(step)}: ${nats(value, 2)} nats`)));
      if (kept[turn * number + line]) figure.append(svg("circle", { cx: (from + to) / 2, cy: y + row / 2, r: 2.4, fill: phases[named[turn]]?.colour ?? "var(--muted)", stroke: "var(--surface)", "stroke-width": 0.7 }));
    });
    const value = Math.max(0, kl[chosen * number + line]), own = kept[chosen * number + line];
    figure.append(svg("rect", { x: bars, y: y + 2.5, width: ((110 * value) / strongest).toFixed(1), height: row - 5, fill: own ? phases[named[chosen]]?.colour ?? "var(--ink)" : "var(--none)" }),
      svg("text", { x: bars + 4 + (110 * value) / strongest, y: y + 11, class: "edge" }, nats(value, 2)));
  });
  const place = axis.steps.indexOf(steps[chosen]);
  figure.append(svg("rect", { class: "cursor", x: x(axis.left[place]), y: 19, width: Math.max(2, x(axis.right[place]) - x(axis.left[place])), height: height + 2 }));
  const bottom = 20 + height;
  figure.append(svg("path", { class: "rule", d: axis.ticks.map(({ at }) => `M${x(at)} ${bottom}v5`).join("") }));
  for (const { at, label } of axis.ticks) figure.append(svg("text", { x: x(at), y: bottom + 19, class: "quiet", "text-anchor": "middle" }, label));
  figure.append(svg("text", { x: left + width / 2, y: bottom + 37, class: "quiet", "text-anchor": "middle" }, "optimizer steps"));
  return figure;
}
