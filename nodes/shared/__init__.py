"""Code that several nodes share: references, the running graph, progress, folders."""
