"""The code of diffusers' own pipelines: what it takes, what it asks for, and stand-ins for parts that are not there."""
