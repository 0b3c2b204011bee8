"""The words that everything here is told in: what a module is for, where its weights are, how it sits on a device."""

from __future__ import annotations

from typing import Literal

Role = Literal["text_encoder", "transformer", "vae", "other"]
ROLES: tuple[Role, ...] = ("text_encoder", "transformer", "vae", "other")

Tier = Literal["disk", "host", "device"]

PlacementName = Literal["resident", "streamed", "cpu"]
STRATEGIES = ("auto", "resident", "streamed", "leafwise", "cpu")  # what a user may ask for
