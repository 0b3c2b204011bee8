"""What lies on disk: folders, single files, their layouts, and whom to trust."""
