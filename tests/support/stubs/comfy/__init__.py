"""Stand-in for the modules of ComfyUI that a node pack may import."""
