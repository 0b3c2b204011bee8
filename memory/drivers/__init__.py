"""The figures of card drivers, asked of their own libraries."""
