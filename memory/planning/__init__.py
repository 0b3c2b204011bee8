"""Decide what to do with memory: sizes and budgets in, plans out. Pure functions, plain data, and dry runs."""
