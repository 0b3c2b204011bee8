"""The weights of one module: its structure and groups, their places in files and in RAM, and how they are read."""
