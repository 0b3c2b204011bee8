"""The engine that places weights on a device: ring, placements, copy streams, staging buffers. Start at `ring`."""
