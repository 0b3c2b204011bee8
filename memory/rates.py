"""The speeds of a machine: how fast it moves weights and computes. All planned seconds are made of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rates:
    """Bytes per second to the device and from disk, and operations per second of large products in bfloat16.

    - `memory_bytes_per_second`, of the device's own memory read and written, and `kernel_seconds`, the least that a
      kernel takes, are for dequantizing. `fused` means that one kernel dequantizes a weight.
    - `float32` and `float16` are operations per second in these types. A VAE computes in float32, which is much slower
      than bfloat16. 0 stands for a quarter of bfloat16 in float32, and for the same in float16.
    - `attention` are operations per second of attention in one kernel. 0 stands for the rate of products.
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
    fused: bool = False

    def operations_in(self, dtype: str) -> float:
        """Return the operations per second of products in `dtype`, named as in safetensors."""
        if dtype == "F32":
            return self.float32_operations_per_second
        return (self.float16 if dtype == "F16" else 0.0) or self.operations_per_second

    def attention_in(self, dtype: str) -> float:
        """Return the operations per second of attention in one kernel.

        It is the same share of the rate of products in each type.
        """
        share = self.attention / self.operations_per_second if self.attention else 1.0
        return share * self.operations_in(dtype)

    @property
    def float32_operations_per_second(self) -> float:
        """Operations per second of convolutions and products in float32."""
        return self.float32 or self.operations_per_second / 4

    @property
    def operations_per_byte(self) -> float:
        """Operations in float32 in the time of copying one byte to the device."""
        found = self.float32_operations_per_second / self.pinned_bytes_per_second
        return found if math.isfinite(found) else ASSUMED.operations_per_byte


# A mid-range card behind PCIe 4 x16 and a good SSD, for plans on a machine that has neither. Attention is taken to be
# as fast as products. The paper of FlashAttention-2 reports up to 73 % of an A100's peak for attention, and 80 to 90 %
# for products. These differ less than the cards that the figures stand for, so published plans stay valid.
ASSUMED = Rates(25e9, 10e9, 3e9, 60e12)

# Hard disks read 0.1 to 0.25 GB/s and seek on top of that, SSDs 0.5 GB/s and more. Only SSDs may serve weights that are
# read in every step.
SLOWEST_DISK_BYTES_PER_SECOND = 0.3e9
