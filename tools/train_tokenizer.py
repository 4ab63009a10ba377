#!/usr/bin/env python3
"""`megafp8 tokenizer train` as a script."""

import sys

from megafp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tokenizer", "train", *sys.argv[1:]]))
