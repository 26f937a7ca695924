"""Runs: recipes, cells, sweeps and the store that holds their results."""
