#!/usr/bin/env python3
"""`megafp8 preprocess` under the name that Megatron users look for."""

import sys

from megafp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
