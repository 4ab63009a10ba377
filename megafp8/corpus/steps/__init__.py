"""One file a kind of step; the folder is the registry that `megafp8.corpus.step_registry` reads."""
