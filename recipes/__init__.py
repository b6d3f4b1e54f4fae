"""Recipes: how the models and data that Kvasir ships were made."""
