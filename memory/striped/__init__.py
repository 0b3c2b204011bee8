"""Runs a VAE layer by layer in horizontal stripes: the numbers of the whole, in as little memory as is given."""

from __future__ import annotations

from .arena import OutOfRamError
from .run import Traffic, run
from .stripe_forecast import StripedForecast, forecast

__all__ = ["OutOfRamError", "StripedForecast", "Traffic", "forecast", "run"]
