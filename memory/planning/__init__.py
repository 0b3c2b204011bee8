"""Decide what to do with memory: sizes and budgets in, plans out. Pure functions, frozen data, and dry runs."""
