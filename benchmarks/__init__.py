"""Measurements of the project itself. Each file at the top is a command; `shared` is what several of them share."""
