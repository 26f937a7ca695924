/** Where a head looks: all positions as a picture, and the last one as bars over the states. */
function attentionPattern(name, pattern, sequence) {
  const n = sequence.length, current = sequence[n - 1];
  const last = pattern.subarray((n - 1) * n), most = Math.max(...last);
  const canvas = html("canvas", { width: n, height: n, role: "img", "aria-label": `Attention of ${name}: ${n} queries down, ${n} keys across` });
  const ink = colour("ink"), paint = canvas.getContext("2d"), image = paint.createImageData(n, n);
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(ink.slice(place, place + 2), 16));
  pattern.forEach((weight, place) => image.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * place));
  paint.putImageData(image, 0, 0);
  const width = 12 * n + 34;
  const strip = svg("svg", { viewBox: `0 0 ${width} 104`, width, height: 104, role: "img", "aria-label": `Attention of ${name} from the last position; most, ${percent(most)}, to position ${last.indexOf(most)}` },
    svg("text", { x: 28, y: 14, class: "quiet", "text-anchor": "end" }, percent(most)), svg("path", { class: "rule", d: `M32 10H${width - 2}M32 84H${width - 2}` }));
  last.forEach((weight, key) => {
    const follows = key > 0 && sequence[key - 1] === current, height = (74 * weight) / most;
    strip.append(svg("rect", { x: 33 + 12 * key, y: 84 - height, width: 10, height, fill: follows ? "var(--G2)" : "var(--muted)" },
      svg("title", {}, `position ${key}, state ${sequence[key]}: ${(100 * weight).toFixed(1)} %`)));
    strip.append(svg("text", { x: 38 + 12 * key, y: 97, class: follows ? "follows" : "quiet", "text-anchor": "middle" }, sequence[key]));
  });
  return html("div", { class: "head" }, html("figure", {}, html("figcaption", {}, html("b", {}, name), "all positions: queries down, keys across"), canvas),
    html("figure", {}, html("figcaption", {}, html("b", {}, "From the last position"), "share of attention to each state of the context"),
      html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${name} from the last position` }, strip)));
}

/** Task vectors of a checkpoint in two components, by the number of their chain, and that of the sequence as a ring. */
function taskPlane({ row, arrays }, place, phi) {
  const flat = row("plane.points", place), axes = row("plane.axes", place), mean = row("plane.mean", place), share = row("plane.share", place);
  const chain = arrays["plane.chain"].data, width = mean.length;
  const own = [0, 1].map((axis) => phi.reduce((sum, value, inner) => sum + (value - mean[inner]) * axes[axis * width + inner], 0));
  const reach = 1.08 * [...flat, ...own].reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  const spot = (value) => 160 + (138 * value) / reach;
  // A round number to read distances by.
  const unit = 10 ** Math.floor(Math.log10(reach / 1.5)), step = [5, 2, 1].map((times) => times * unit).find((size) => size <= reach / 1.5);
  const figure = svg("svg", { viewBox: "0 0 320 320", role: "img", "aria-label": `Task vectors of ${chain.length} sequences of ${new Set(chain).size} chains in two components` },
    svg("path", { class: "rule", d: "M20 160H300M160 20V300" }));
  chain.forEach((number, index) => figure.append(
    svg("text", { x: spot(flat[2 * index]).toFixed(1), y: (spot(-flat[2 * index + 1]) + 4).toFixed(1), "text-anchor": "middle", class: "point", style: `fill: hsl(${45 * number} 65% ${number % 2 ? 42 : 52}%)` }, number + 1)));
  figure.append(svg("circle", { class: "ring", cx: spot(own[0]).toFixed(1), cy: spot(-own[1]).toFixed(1), r: 8 }, svg("title", {}, "the sequence above")),
    svg("path", { class: "scale", d: `M${300 - (138 * step) / reach} 296H300` }), svg("text", { x: 300, y: 291, class: "quiet", "text-anchor": "end" }, step),
    svg("text", { x: 160, y: 317, class: "quiet", "text-anchor": "middle" }, `${percent(share[0])} of the variance`),
    svg("text", { x: -160, y: 12, class: "quiet", "text-anchor": "middle", transform: "rotate(-90)" }, `${percent(share[1])} of the variance`));
  return figure;
}
