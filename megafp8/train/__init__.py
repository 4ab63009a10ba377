"""Floor 6: a run. setup shows what exists, step what a step is, loop what happens around it."""
