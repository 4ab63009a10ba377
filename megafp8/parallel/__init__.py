"""Processes: who stands where in the mesh and what they exchange. No numbers, no model; importing it is light."""
