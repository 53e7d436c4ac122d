"""``longcat-pd top``: the facts of the balancer's status page in a terminal, once or for as long as somebody looks.

Owns the command's arguments, the terminal and the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from longcat_pd.clock import Clock, MonotonicClock
from longcat_pd.config.keys import read_keys
from longcat_pd.errors import ConfigError
from longcat_pd.top.picture import picture
from longcat_pd.top.watch import Balancer, News, NoFacts, news, snapshot

EXIT_OK, EXIT_WRONG, EXIT_REFUSED = 0, 1, 2
DEFAULT_URL = "http://127.0.0.1:8081"
LONGEST_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all is well, or who looked has seen enough; 1 something is wrong, or is not told; 2 refused."""
    options = _parser().parse_args(arguments)
    try:
        key = None if options.key_file is None else read_keys(options.key_file)[0]
        balancer = Balancer(url=options.url.rstrip("/"), key=key)
        if options.once:
            return asyncio.run(show_once(balancer, sys.stdout))
        if not sys.stdout.isatty():
            raise ConfigError("there is no terminal to draw in; --once prints one picture")
        return asyncio.run(watch(balancer, sys.stdout, interval_s=options.interval))
    except ConfigError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return EXIT_REFUSED
    except NoFacts as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_WRONG
    except KeyboardInterrupt:  # before its signal was ours
        return EXIT_OK


def console_on(out: TextIO) -> Console:
    """Where pictures are drawn: with colours in a terminal, and plain text anywhere else, whatever the environment says."""
    if out.isatty():
        return Console(file=out, highlight=False, markup=False, emoji=False)
    return Console(file=out, highlight=False, markup=False, emoji=False, force_terminal=False, color_system=None)


async def show_once(balancer: Balancer, out: TextIO) -> int:
    """Print one picture; the exit status. Raises NoFacts."""
    facts = await snapshot(balancer)
    console_on(out).print(picture(facts))
    return EXIT_WRONG if facts["wrong"] else EXIT_OK


async def watch(balancer: Balancer, out: TextIO, *, interval_s: float) -> int:
    """Draw until a signal; the exit status. Raises NoFacts. The terminal is left as it was found."""
    told_to_end, clock = asyncio.Event(), MonotonicClock()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    first = Text(f"asking {balancer.url} ...")
    with Live(
        first, console=console_on(out), screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        live.refresh()
        await draw(live, balancer, clock, interval_s=interval_s, told_to_end=told_to_end)
    return EXIT_OK


async def draw(live: Live, balancer: Balancer, clock: Clock, *, interval_s: float, told_to_end: asyncio.Event) -> None:
    """A picture of all news, of facts one in ``interval_s`` at most. Raises NoFacts."""
    drawn_at = -math.inf
    async with aclosing(news(balancer, clock, told_to_end=told_to_end)) as all_news:
        async for one in all_news:
            if not one.problem and clock.now() - drawn_at < interval_s:
                continue
            live.update(shown(one), refresh=True)
            drawn_at = -math.inf if one.problem else clock.now()


def shown(one: News) -> RenderableType:
    """What news look like."""
    if one.facts is None:
        return Text(one.problem)
    return picture(one.facts, remark=f"Not up to date: {one.problem}." if one.problem else "")


def _seconds(text: str) -> float:
    """Raises ArgumentTypeError."""
    value = float(text)
    if not 0 <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {LONGEST_S:g}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longcat-pd top",
        description="What the balancer's status page shows, in a terminal; Ctrl-C ends it. "
        "Exit status: 0 all is well, 1 something is wrong or is not told, 2 refused.",
    )
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"of the balancer (default {DEFAULT_URL})"
    )
    parser.add_argument("--key-file", metavar="FILE", help="with a client's key, where the balancer wants one")
    parser.add_argument("--once", action="store_true", help="print one picture and end; needs no terminal")
    parser.add_argument(
        "--interval", type=_seconds, default=0.0, metavar="S", help="between pictures (default: each time there are news)"
    )
    return parser
