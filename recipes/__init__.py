"""Complete runs. Each file here is a command; `parts` has their common code."""
