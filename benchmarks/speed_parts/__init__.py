"""The parts of `speed.py`: one file per kind of measurement, and what they share."""
