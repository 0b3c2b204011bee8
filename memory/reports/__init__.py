"""What is where, and what happened: the state of a manager, and the record of its stages."""
