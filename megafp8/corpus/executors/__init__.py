"""One file a kind of executor: where tasks run. None changes a byte of what they make."""
