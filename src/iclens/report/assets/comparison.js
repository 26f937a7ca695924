// Runs side by side: in each, the cell and the step that are chosen are told below its map.

JSON.parse(byId("runs").textContent).forEach((run, place) => {
  const look = (cell, step) => {
    const last = run.cells[cell].steps - 1;
    mark(cell, step);
    byId(`now-${place}`).replaceChildren(...(last < 0 ? [] : details(run, run.cells[cell], Math.min(step ?? last, last))));
  };
  const mark = phaseMap(byId(`map-${place}`), run, look);
  if (run.cells.length) look(richest(run.cells), null);
});
