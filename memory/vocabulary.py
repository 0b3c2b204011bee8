"""The words of the whole package: roles of modules, tiers of weights, placements and strategies."""

from __future__ import annotations

from typing import Literal

Role = Literal["text_encoder", "transformer", "vae", "other"]
ROLES: tuple[Role, ...] = ("text_encoder", "transformer", "vae", "other")

Tier = Literal["disk", "host", "device"]

PlacementName = Literal["resident", "streamed", "cpu"]
STRATEGIES = ("auto", "resident", "streamed", "leafwise", "cpu")  # a user's choices; "leafwise" is the least ring
