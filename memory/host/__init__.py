"""ComfyUI's own memory management: its calls, flags and contract, and our units as it sees them."""
