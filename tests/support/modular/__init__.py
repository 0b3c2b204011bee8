"""Tiny modular pipelines."""
