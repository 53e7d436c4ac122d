"""A rank process whose standard output belongs to the bench: it logs warnings only, to standard error."""

from __future__ import annotations

from longcat_pd import log
from longcat_pd.engine import rank


def main(config: str) -> None:
    """Entry of a rank process. ``config``: a RankSpec as JSON."""
    log.set_up(level="warning")
    rank.main(config)
