"""ComfyUI's own CLIP and VAE, run by this pack."""
