"""Tests that start real processes, all through `ranks.run_ranks`."""
