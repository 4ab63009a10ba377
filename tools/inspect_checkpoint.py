#!/usr/bin/env python3
"""`megafp8 checkpoint show` as a script."""

import sys

from megafp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", "show", *sys.argv[1:]]))
