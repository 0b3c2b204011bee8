"""ComfyUI's own CLIP and VAE, run by this pack, and its MODEL, budgeted and planned."""
