"""From conditioning to latents: sizes, latents, kernels."""
