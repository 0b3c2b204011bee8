"""How weights pass through a device: placements, the ring of bytes, copy queues, windows."""
