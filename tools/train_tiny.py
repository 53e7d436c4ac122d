"""``python -m tools.train_tiny OUT``: train the small LongCat-2.0 that is shipped, from nothing, on the CPU.

The recipe is ``tools/tiny/recipe.py``. Writes the checkpoint ``OUT/bf16`` and, by the package's own ``quantize``,
``OUT/int8``. State is kept in ``OUT/state`` every few minutes: the same command goes on from there, and ends at once where
all is done. The same seed, threads, torch and kind of processor give the same files to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.tokenizer import spaced_pieces
from tools.tiny import export
from tools.tiny.feeding import Feeder
from tools.tiny.recipe import CONFIG, LONGEST, Recipe
from tools.tiny.rendering import Renderer
from tools.tiny.training import Seen, Training
from tools.tiny.twin import Twin

KEEP_EVERY = 250
SHOW_EVERY = 50
BAR = 40  # characters
ERASE = "\x1b[K"  # what is left of a longer line


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then write both checkpoints. Exit status 0; 2: another training or checkpoint is there already, or nothing can
    be written there."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the checkpoints and the state")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"argument --threads: {options.threads}: must be at least 1")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)  # else the threads of a scattered sum end in any order; costs no time here
    keep_memory()
    recipe = replace(Recipe(), seed=options.seed, steps=options.steps)
    try:
        with alone(options.out / "state"):
            train(recipe, options.out)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Make the folder and keep other trainings out of it, which would write the same files. Raises ConfigError."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{state}: another training is at work there") from error
        yield


def train(recipe: Recipe, out: Path) -> None:
    """Go on or begin, and write what came of it. Raises ConfigError."""
    state = out / "state"
    text = export.text_files(state / "text", seed=recipe.seed)
    torch.manual_seed(recipe.seed)
    alike = spaced_pieces(Tokenizer.from_file(str(state / "text" / "tokenizer.json")))
    twin = Twin(ModelConfig.from_dict(CONFIG), longest=LONGEST, alike=alike)
    feeder = Feeder(recipe, Renderer(text), vocab_size=CONFIG["vocab_size"], longest=LONGEST)
    training = Training(twin, recipe, feeder)
    training.resume_if_kept(state)
    if training.step == 0:
        export.check_room(out)
    run(training, state)
    export.checkpoints(out, twin, text=state / "text")


def keep_memory() -> None:
    """Tells glibc not to give memory back between steps: asking for it anew takes more time than the sums (Linux)."""
    if sys.platform == "linux":
        libc, mmap_max, trim_threshold, top_pad = ctypes.CDLL(None), -4, -1, -2
        for parameter, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**28)):
            libc.mallopt(parameter, value)


def run(training: Training, state: Path) -> None:
    """All steps that are left: a bar on a terminal, and now and then a line of what was learnt."""
    began, first, tokens = time.monotonic(), training.step, 0
    shown = list[Seen]()
    while training.step < training.recipe.steps:
        seen = training.advance()
        shown.append(seen)
        tokens += seen.tokens
        passed = time.monotonic() - began
        left_s = passed / (training.step - first) * _left(training)
        if training.step % SHOW_EVERY == 0 or training.step == training.recipe.steps:
            _show(training, shown, speed=tokens / passed, left_s=left_s)
            shown = []
        _draw_bar(training, left_s=left_s)
        if training.step % KEEP_EVERY == 0 or training.step == training.recipe.steps:
            training.keep(state)


def _draw_bar(training: Training, *, left_s: float) -> None:
    """On a terminal; the next bar or line is written over it."""
    if sys.stderr.isatty():
        done = training.step / training.recipe.steps
        bar = f"{'#' * int(done * BAR)}{'.' * (BAR - int(done * BAR))}"
        sys.stderr.write(f"[{bar}] {done:.0%}, step {training.step}, {left_s / 60:.0f} min left{ERASE}\r")
        sys.stderr.flush()


def _left(training: Training) -> int:
    return training.recipe.steps - training.step


def _show(training: Training, shown: Sequence[Seen], *, speed: float, left_s: float) -> None:
    step, steps, now = training.step, training.recipe.steps, training.pace.curriculum
    right, asked = dict[str, float](), dict[str, float]()
    for seen in shown:
        for skill, count in seen.asked.items():
            asked[skill] = asked.get(skill, 0.0) + count
            right[skill] = right.get(skill, 0.0) + seen.right[skill]
    rates = " ".join(f"{skill} {right[skill] / asked[skill]:.2f}" for skill in sorted(asked))
    drafts = [sum(seen.drafted[k] for seen in shown) / max(sum(seen.draftable[k] for seen in shown), 1.0) for k in range(3)]
    mean = {name: sum(vars(seen)[name] for seen in shown) / len(shown) for name in ("next", "drafts")}
    index = sum(seen.index for seen in shown) / max(sum(seen.has_index for seen in shown), 1)
    sys.stderr.write(
        f"{step}/{steps} loss {mean['next']:.3f} drafts {mean['drafts']:.3f} index {index:.3f} | {rates} | "
        f"drafts right {' '.join(f'{d:.2f}' for d in drafts)} | copied {now.copied} pairs {now.pairs} "
        f"sparse {training.is_sparse:d} | {speed:.0f} tokens/s, {left_s / 60:.0f} min left"
        f"{ERASE if sys.stderr.isatty() else ''}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
