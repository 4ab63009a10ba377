"""`python -m megafp8 <verb>`, as torchrun -m needs it."""

import sys

from megafp8.cli.main import main

sys.exit(main())
