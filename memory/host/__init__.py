"""ComfyUI's own memory management: its functions, flags and contract, and our units as it sees them."""
