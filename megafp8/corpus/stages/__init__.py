"""One file a stage: `run(work)` makes a task's outputs; `VERSION` is raised when the same task gives other bytes."""
