"""From latents to pictures, and back: in float32, whole, in stripes or in tiles."""
