"""Any class of diffusers, driven by its own code."""
