"""The state of a manager, and the record of its stages."""
