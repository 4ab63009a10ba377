"""A backend says HOW: it quantizes by a spec and multiplies. `emulated` is the definition, the others follow it."""
