"""How the bytes of a weight are stored, and made into a plain tensor on the device."""
