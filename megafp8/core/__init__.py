"""Floor 1: errors, logging, configuration, layouts and seeds. Nothing here knows a model or a process group."""
