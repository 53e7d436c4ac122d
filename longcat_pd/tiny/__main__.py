"""``python -m longcat_pd.tiny``: the command line of ``write_tiny``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.errors import ConfigError
from longcat_pd.tiny.configs import VARIANTS
from longcat_pd.tiny.make import DEFAULT_SHARD_BYTES, DTYPES, PREDICTABLE, write_tiny


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on standard error when the arguments do not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m longcat_pd.tiny", description="Write a small random checkpoint in the format of the releases."
    )
    parser.add_argument("--variant", choices=VARIANTS, default="2.0")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make; it must not exist or be empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--no-tokenizer", action="store_true")
    parser.add_argument("--predictable", action="store_true", help="tokens that the draft layer mostly guesses")
    parser.add_argument("--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields of config.json, such as num_layers=4")
    options = parser.parse_intermixed_args(arguments)
    try:
        write_tiny(
            options.out,
            options.variant + (PREDICTABLE if options.predictable else ""),
            seed=options.seed,
            dtype=options.dtype,
            with_tokenizer=not options.no_tokenizer,
            overrides=options.overrides,
            max_shard_bytes=options.max_shard_bytes,
        )
    except ConfigError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
