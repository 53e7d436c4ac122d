"""``longcat-pd replay``: a recorded request once more, here and perhaps on another layout: are the ids the same?

Owns the command's arguments, what is refused, and what is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.errors import ConfigError, InvalidRequest, LongcatError
from longcat_pd.models.checkpoint import checkpoint_digest
from longcat_pd.replay.compare import Comparison, Difference, Replayed
from longcat_pd.replay.layouts import Layout
from longcat_pd.server.bundle import Bundle, read_bundle
from longcat_pd.server.text import TextProcessor
from longcat_pd.version import VERSION

STATUS_SAME, STATUS_DIFFERENT, STATUS_REFUSED, STATUS_FAILED = 0, 1, 2, 3

_SHOWN = 8  # ids in front of the first difference


def main(arguments: Sequence[str]) -> int:
    """Replay one bundle; the exit status: 0 the same ids, 1 others, 2 refused, 3 it failed here."""
    options = _parser().parse_args(arguments)
    log.set_up(level="warning")
    try:
        bundle = read_bundle(options.file)
        model = _checkpoint(bundle, options.model)
        text = TextProcessor.load(model)
        _refuse_foreign_ids(bundle, text, options.file)
        layout = Layout(bundle, model, options.layout)
        return asyncio.run(_replay(bundle, layout, text, sys.stdout))
    except (ConfigError, InvalidRequest) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in error.message.splitlines()))
        return STATUS_REFUSED
    except LongcatError as error:
        sys.stderr.write(f"error: the replay failed with {error.code}: {error.message}\n")
        return STATUS_FAILED
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("stopped by a signal before the end\n")
        return STATUS_FAILED


def _checkpoint(bundle: Bundle, given: str | None) -> str:
    """The folder of the checkpoint that answered. Raises ConfigError: there is none, or it is another one."""
    if bundle.has_grammar and bundle.texts is None:
        raise ConfigError("has_grammar=true: the answer was bound to a grammar, which is recorded only with record.texts")
    folder = given or bundle.model.path
    if not Path(folder).is_dir():
        raise ConfigError(f"model.path={folder}: no such folder here; --model names another one")
    digest = checkpoint_digest(Path(folder), has_weights=bundle.model.weights == "checkpoint")
    if digest != bundle.model.digest:
        raise ConfigError(f"model.digest={bundle.model.digest} was recorded, {folder} has {digest}: another checkpoint")
    return folder


def _refuse_foreign_ids(bundle: Bundle, text: TextProcessor, file: str) -> None:
    sampling = bundle.sampling
    lists = {
        "prompt_token_ids": bundle.prompt_token_ids,
        "answer_token_ids": bundle.answer_token_ids,
        "sampling.stop_token_ids": sampling.stop_token_ids,
        "sampling.logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
    }
    for name, ids in lists.items():
        text.check_ids(ids, f"{file}: {name}")


async def _replay(bundle: Bundle, layout: Layout, text: TextProcessor, out: TextIO) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    for line in _recorded(bundle):
        out.write(f"{line}\n")
    out.write(f"replayed  {layout}\n")
    out.flush()
    clock = MonotonicClock()
    asked = layout.build(clock)
    comparison = Comparison(bundle, asked, clock)
    try:
        await asked.start()
        replayed = await comparison.replay()
        difference = comparison.difference(replayed)
        if difference is not None and None not in (difference.recorded, difference.replayed):
            difference = await comparison.judged(difference)
    finally:
        await asked.close()
    for line in _verdict(bundle, replayed, difference, text=text):
        out.write(f"{line}\n")
    return STATUS_SAME if difference is None else STATUS_DIFFERENT


def _recorded(bundle: Bundle) -> Iterator[str]:
    sampling, ending = bundle.sampling, bundle.ending
    yield f"request   {bundle.request_id}, choice {sampling.choice}, of {bundle.recorded_at}"
    said = f", {sampling.num_said} of them said before" if sampling.num_said else ""
    yield (
        f"asked     {len(bundle.prompt_token_ids)} ids{said}; seed {sampling.seed}, "
        f"temperature {sampling.temperature:g}, at most {sampling.max_tokens}"
    )
    how = ending.finish or ending.code or "by the client"
    yield f"answered  {len(bundle.answer_token_ids)} ids, {ending.outcome} ({how})"
    instances = (
        " ".join([one.name, *(f"{name}={size}" for name, size in one.parallel.items()), f"drafts={one.num_draft_tokens}"])
        for one in bundle.instances
    )
    yield f"recorded  {' -> '.join(instances)}; {bundle.model.dtype}, torch {bundle.versions.torch}"
    if bundle.versions.package != VERSION:
        yield f"note      recorded by version {bundle.versions.package}, this is {VERSION}"
    if not bundle.is_as_recorded:
        yield "note      ids of this file have been changed since it was recorded"


def _verdict(bundle: Bundle, replayed: Replayed, difference: Difference | None, *, text: TextProcessor) -> Iterator[str]:
    num_recorded, num_found = len(bundle.answer_token_ids), len(replayed.token_ids)
    if difference is None:
        yield f"identical: {num_recorded} ids" if num_recorded else "nothing was answered, so nothing can differ"
        if num_found > num_recorded or bundle.ending.outcome == "failed":
            yield f"  here the answer went on to {num_found} ids" + (f" ({replayed.finish})" if replayed.finish else "")
        return
    position = difference.position
    yield f"different at position {position} of {num_recorded}"
    yield f"  recorded  {_id(difference.recorded, text)}{_logprob(difference, difference.recorded)}"
    yield f"  replayed  {_id(difference.replayed, text)}{_logprob(difference, difference.replayed)}"
    before = bundle.answer_token_ids[max(position - _SHOWN, 0) : position]
    if before:
        yield f"  behind    {', '.join(_id(token_id, text) for token_id in before)}"


def _id(token_id: int | None, text: TextProcessor) -> str:
    if token_id is None:
        return "the end"
    return f"{token_id} {text.token_text(token_id)[0]!r}" if text.has_tokenizer else str(token_id)


def _logprob(difference: Difference, token_id: int | None) -> str:
    if not difference.logprobs or token_id is None:
        return ""
    known = difference.logprobs.get(token_id)
    return f", log-prob {known:.6f}" if known is not None else f", log-prob below {min(difference.logprobs.values()):.4f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longcat-pd replay",
        usage="longcat-pd replay FILE [--model DIR] [--layout WORD ...]",
        description="Ask for a recorded answer again. Exit status: 0 the same ids, 1 others, 2 refused, 3 it failed here.",
    )
    parser.add_argument("file", metavar="FILE", help="a bundle, as serve --record and record.dir keep them")
    parser.add_argument("--model", metavar="DIR", help="the same checkpoint, where it lies elsewhere than it did")
    parser.add_argument(
        "--layout", nargs="+", action="extend", default=[], metavar="WORD",
        help="key.path=value, as prefill.parallel.cp_size=2 decode.parallel.kvp_size=2 for two pools or "
        "parallel.attn_tp_size=2 for one engine; or a cluster YAML. Default: one engine with one rank",
    )  # fmt: skip
    return parser
