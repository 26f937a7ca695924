"""Circuits: which edges of a transformer carry out what it does, and in which role."""
