"""Scores a model on lm-eval's stock tasks.

Modules import each other relatively, so that `eval/run.py` can import the package as `scoring`.
"""
