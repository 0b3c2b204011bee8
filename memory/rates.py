"""How fast a machine moves weights and computes. What the planner's seconds are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rates:
    """Bytes per second to the device and from disk, and operations per second of large products in bfloat16.

    Decoding weights goes by the bytes per second of the device's own memory, read and written, and the least that a
    kernel takes. A VAE computes in float32, which is slower by far than bfloat16; 0 stands for a quarter of that, and
    for as much as that in float16 and in `attention`, if that is one kernel.
    """

    pinned_bytes_per_second: float
    paged_bytes_per_second: float
    disk_bytes_per_second: float
    operations_per_second: float
    source: Literal["measured", "simulated", "assumed"] = "assumed"
    memory_bytes_per_second: float = 300e9
    kernel_seconds: float = 4e-6
    float32: float = 0.0
    float16: float = 0.0
    attention: float = 0.0

    def operations_in(self, dtype: str) -> float:
        """Operations per second of what computes in a type, named as in safetensors."""
        if dtype == "F32":
            return self.float32_operations_per_second
        return (self.float16 if dtype == "F16" else 0.0) or self.operations_per_second

    def attention_in(self, dtype: str) -> float:
        """Operations per second of attention in one kernel: of the rate of products the same share in each type."""
        share = self.attention / self.operations_per_second if self.attention else 1.0
        return share * self.operations_in(dtype)

    @property
    def float32_operations_per_second(self) -> float:
        """Operations per second of convolutions and products in float32."""
        return self.float32 or self.operations_per_second / 4

    @property
    def operations_per_byte(self) -> float:
        """In float32, in the time that a byte takes to the device."""
        found = self.float32_operations_per_second / self.pinned_bytes_per_second
        return found if math.isfinite(found) else ASSUMED.operations_per_byte


# A card of the middle class behind PCIe 4 x16, and a good SSD: for plans made on a machine that has neither. Attention
# is taken to be as fast as products: of an A100's peak the paper of FlashAttention-2 tells up to 73 % for it, and 80 to
# 90 % for products, which is less apart than the cards that this stands for. So what is published as planned holds.
ASSUMED = Rates(25e9, 10e9, 3e9, 60e12)

# Hard disks have 0.1 to 0.25 GB/s and want to seek besides, SSDs 0.5 and more: weights that are read in every step come
# from the latter only.
SLOWEST_DISK_BYTES_PER_SECOND = 0.3e9
