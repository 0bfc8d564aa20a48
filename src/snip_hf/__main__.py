"""Runs the command line as `python -m snip_hf`."""

import sys

from .cli import main

sys.exit(main())
