"""Processes: who stands where and what they exchange. No numbers, no model; importing it is light."""
