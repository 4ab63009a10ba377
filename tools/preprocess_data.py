#!/usr/bin/env python3
"""`megafp8 preprocess` under the name that Megatron users look for; with a corpus.toml, or Megatron's arguments."""

import sys

from megafp8.cli.main import guarded, main
from megafp8.cli.megatron_preprocess import is_meant, run

if __name__ == "__main__":
    words = sys.argv[1:]
    if is_meant(words):
        sys.exit(guarded("preprocess", lambda: run(words), debug=False))
    sys.exit(main(["preprocess", *words]))
