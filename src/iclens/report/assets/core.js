// What every script of a page uses.

const byId = (id) => document.getElementById(id);

// Everything is made of elements and text, so that no name in the data is ever read as markup.
const make = (space) => (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const svg = make("http://www.w3.org/2000/svg"), html = make("http://www.w3.org/1999/xhtml");

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const nats = (value, digits = 3) => (value === null ? "–" : value.toPrecision(digits).replace("-", "−"));
const symbol = (name) => [name[0], svg("tspan", { dy: 3, "font-size": "9" }, name[1]), svg("tspan", { dy: -3 }, name[2])];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The path of a model through the phases, in words. */
function story(cell) {
  if (!cell.steps) return cell.outcome;
  const path = cell.begins.map(([phase, step]) => `${phase} from step ${count(step)}`);
  return (path.join(", ") || "no phase yet") + (cell.complete ? "" : `; ${cell.outcome}`);
}

/** The place of the model that goes through the most phases, to begin with. */
function richest(cells) {
  const turns = cells.map((cell) => (cell.steps ? cell.begins.length : -1));
  return turns.indexOf(Math.max(...turns));
}

/** The bytes of a compressed block of the page. */
async function unpack(id) {
  const text = atob(byId(id).textContent), packed = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) packed[place] = text.charCodeAt(place);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// ---- a tip beside the pointer ----
const tip = byId("tip");

function showTip(near, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const besides = near.x + 16 + width < document.documentElement.clientWidth ? near.x + 16 : near.x - 16 - width;
  tip.style.left = `${Math.max(8, besides)}px`;
  tip.style.top = `${Math.max(8, Math.min(near.y + 16, window.innerHeight - height - 8))}px`;
}

const hideTip = () => { tip.hidden = true; };
window.addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("pointerdown", hideTip);

/** What a model is at a step: label, margin, shares and distances. */
function details({ axis, phases }, cell, step) {
  const phase = cell.phase[step], known = phase !== "none";
  const heading = known ? `${phase}, ${phases[phase].reference}${cell.clear[step] ? "" : " (unclear)"}` : "no phase";
  const lines = [html("p", { class: "title" }, heading),
    html("p", {}, `K = ${cell.chains}, seed ${cell.seed}, step ${count(axis.steps[step])}`),
    html("p", {}, `margin ${nats(cell.margin[step])} ± ${nats(cell.error[step], 1)} nats; OOD ${cell.ood[step] === "none" ? "no phase" : cell.ood[step]}`)];
  const head = (text) => html("th", { class: "number", scope: "col" }, text);
  const table = html("table", {}, html("tr", {}, html("td", {}, ""), head("share"), head("ID, nats"), head("OOD")));
  Object.values(phases).forEach(({ colour: border, reference }, index) => {
    if (cell.composition[index][step] === null && cell.distance.id[index][step] === null) return;
    const share = cell.composition[index][step];
    table.append(html("tr", {}, html("th", { scope: "row" }, html("i", { class: "line", style: `border-color: ${border}` }), reference),
      html("td", { class: "number" }, share === null ? "–" : percent(share)),
      html("td", { class: "number" }, nats(cell.distance.id[index][step])),
      html("td", { class: "number" }, nats(cell.distance.ood[index][step]))));
  });
  return [...lines, table, html("p", {}, `KL(model ‖ mixture) ${nats(cell.residual[step], 2)} nats`)];
}
