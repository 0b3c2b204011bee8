"""Stand-in for the node API of ComfyUI, for machines without a host."""
