"""The model families that need code of their own. None of them knows another."""
