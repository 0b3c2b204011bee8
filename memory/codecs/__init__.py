"""Codecs: how the bytes of one weight are encoded, and decoded into a plain tensor on the device."""
