"""The models: diffusers' classes, HiDream-I1, NewBie-image, Pyramid-Flow."""
