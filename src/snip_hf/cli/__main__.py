"""Runs the command line as `python -m snip_hf.cli`."""

import sys

from . import main

sys.exit(main())
