"""Forecasts of a pipeline's stages, and plans of its runs."""
