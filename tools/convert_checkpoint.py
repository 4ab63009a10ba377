#!/usr/bin/env python3
"""`megafp8 convert` as a script."""

import sys

from megafp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
