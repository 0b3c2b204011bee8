"""The version of the host that these stand-ins are like."""

__version__ = "0.33.0"
