"""Runs a VAE layer by layer in horizontal stripes: the numbers of the whole, in as little memory as is given."""

from __future__ import annotations

from .forecast import StripedForecast, forecast
from .run import Traffic, run

__all__ = ["StripedForecast", "Traffic", "forecast", "run"]
