"""Measurements of the project itself. Each file at the top is a command; `shared` has their common code."""
