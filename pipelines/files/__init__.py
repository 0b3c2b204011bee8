"""Model files on disk: folders, single files, their layouts, and whom to trust."""
