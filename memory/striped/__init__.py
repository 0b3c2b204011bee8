"""Run a VAE layer by layer in horizontal stripes, within a budget of device memory.

The result is that of the whole up to float32 rounding, without seams: see [Note: Stripe exactness] in `lazy_tensor`.
"""

from __future__ import annotations

from .arena import OutOfRamError
from .run import Traffic, run
from .stripe_forecast import StripedForecast, forecast

__all__ = ["OutOfRamError", "StripedForecast", "Traffic", "forecast", "run"]
