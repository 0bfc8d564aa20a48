"""What a recipe is, and the data and the model that it asks for.

Modules import each other relatively, so that commands beside this folder import `parts`, and the rest of the
repository imports `recipes.parts`.
"""
