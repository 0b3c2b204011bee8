"""LoRA files: read once, their names looked up, and made the branches of the modules of a pipeline."""
