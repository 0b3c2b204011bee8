"""What the drivers of cards tell, asked of their own libraries."""
