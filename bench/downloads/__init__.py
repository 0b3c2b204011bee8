"""Folders of published models as people download them: real headers in each stored form, zeros that take no disk."""
