"""The policies that decide which GEMM runs in which format: SNIP, rules, and criteria of other methods.

Most files are named after their policy. Two hold several policies that share one function: `rules` fills a share in a
fixed order ("random", "layer-type", "layer-position", "first2-last8", "last-15-percent", "backward-first"), and
`published` keeps blocks in BF16 ("first2-last8-bf16", "last-15-percent-bf16", "first-last-bf16").
"""

# The order in which error messages and documentation list them.
from . import snip, snip_paper, uniform, rules, published, errors, fisher, hessian_trace, greedy, kl  # noqa: F401, I001
