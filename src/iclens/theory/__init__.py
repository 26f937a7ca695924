"""Theory: reduced models of both circuits, the race between them, fits of the thresholds."""
