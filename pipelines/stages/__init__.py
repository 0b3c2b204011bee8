"""The stages: encode, sample, decode, and many prompts stage by stage."""
