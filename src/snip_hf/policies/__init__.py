"""Who decides which GEMM runs in which format: SNIP, rules, and the criteria of other methods. One file per family."""

# The order in which error messages and documentation list them.
from . import snip, uniform, rules, errors, fisher, hessian_trace, greedy, kl  # noqa: F401, I001
