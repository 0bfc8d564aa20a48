"""How a model is scored on lm-eval's stock tasks.

Modules import each other relatively, so that `eval/run.py` can import the package as `scoring`.
"""
