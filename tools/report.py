"""Door to `megafp8 report`: tools/report.py RUN ... --out DIR."""

import sys

from megafp8.cli.main import main

sys.exit(main(["report", *sys.argv[1:]]))
