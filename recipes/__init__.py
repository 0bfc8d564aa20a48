"""Complete runs. Each file here is a command; `parts` is what they share."""
