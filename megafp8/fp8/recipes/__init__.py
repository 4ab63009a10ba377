"""One file a recipe; the folder is the registry that `megafp8.fp8.recipe` reads."""
