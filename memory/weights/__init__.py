"""One module: its structure, its weights, where they lie in files and in RAM, and how they are read."""
