"""Door to `megafp8 pretrain`, for launch scripts that start a file: torchrun tools/pretrain.py run.toml."""

import sys

from megafp8.cli.main import main

sys.exit(main(["pretrain", *sys.argv[1:]]))
