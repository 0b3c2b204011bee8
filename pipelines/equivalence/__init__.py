"""Compare a model in stages with its own call, before any weight is loaded."""
