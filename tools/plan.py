"""Door to `megafp8 plan`: tools/plan.py --mesh run.toml."""

import sys

from megafp8.cli.main import main

sys.exit(main(["plan", *sys.argv[1:]]))
