"""Whether this process only compiles kernels for another one (`training.compiling`).

Such a process is to be ready soon. Packages whose import loads much of torch or transformers then leave out what it
does not use: the kinds of layers, and the backends whose kernels are not foreseen.
"""

from __future__ import annotations

is_lean = False
