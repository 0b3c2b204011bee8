"""Runs a VAE layer by layer in horizontal stripes: the numbers of the whole, in as little memory as is given."""

from __future__ import annotations

from .forecast import StripedForecast, forecast
from .room import OutOfRamError
from .run import Traffic, run

__all__ = ["OutOfRamError", "StripedForecast", "Traffic", "forecast", "run"]
