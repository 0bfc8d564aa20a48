"""The policies that decide which GEMM runs in which format: SNIP, rules, and criteria of other methods."""

# The order in which error messages and documentation list them.
from . import snip, snip_paper, uniform, rules, published, errors, fisher, hessian_trace, greedy, kl  # noqa: F401, I001
