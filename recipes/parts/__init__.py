"""Recipes: their sections, their data and their model.

Modules import each other relatively, so that commands beside this folder import `parts`, and the rest of the
repository imports `recipes.parts`.
"""
