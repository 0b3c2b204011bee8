"""The command line: `ballast demo`, `generate`, `plan`, `doctor`, `bench`."""
