"""Landscapes in two styles, for recipes that are given no images."""
