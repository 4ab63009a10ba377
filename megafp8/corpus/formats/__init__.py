"""One file a `source.kind`: `records(path, stream, config, first_line)` yields its records, good, bad and skipped."""
