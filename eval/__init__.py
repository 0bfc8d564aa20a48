"""Scores of trained models (`run.py`, `scoring`) and comparisons of policies (`compare.py`)."""
