"""What several nodes share: references, the running graph, progress, folders."""
