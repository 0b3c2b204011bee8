"""Stand-in for the execution helpers of ComfyUI."""
