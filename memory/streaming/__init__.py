"""How weights pass through a device: placements, the ring of slots, copy queues, windows."""
