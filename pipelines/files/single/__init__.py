"""Models in single files: which one a file holds, and where each parameter lies in it."""
