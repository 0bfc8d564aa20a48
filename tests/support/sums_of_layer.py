"""`LayerSums` of the default formats, as most tests of the sums want them."""

from __future__ import annotations

from functools import partial

from snip_hf.config import SnipConfig
from snip_hf.estimation import layer_sums

# The most precise first, as a refresh has them.
LayerSums = partial(layer_sums.LayerSums, formats=SnipConfig().formats[::-1])
