"""The trained checkpoint beside the random ones, for tools; where it lies is known in ``config/shipped.py``."""

from __future__ import annotations

from longcat_pd.config.shipped import SERVED_NAME, Variant, shipped_checkpoint

__all__ = ["SERVED_NAME", "Variant", "shipped_checkpoint"]
