"""``longcat-pd plan FILE --roofline``: estimated times of prompts and decode steps over context and sequences, as text.

Owns words and tables; the numbers are those of ``sizing/roofline.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from longcat_pd.config.checks import pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec
from longcat_pd.config.schema import ClusterConfig, InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.cards import CARDS, Card, card_of
from longcat_pd.sizing.pricing import Estimate
from longcat_pd.sizing.rates import Rates, rates_of
from longcat_pd.sizing.roofline import decode_step, prefill

LENGTHS = (4096, 32768, 131072)  # as far as they fit, and then the longest
SHOWN = 6  # causes
MOST = 1 << 30  # tokens, sequences: chunks and layouts of more are not gone through in any time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``--roofline`` takes, and ``--advise`` too."""
    group = parser.add_argument_group("estimates instead, for cards that reach what sizing/rates.py says")
    group.add_argument("--roofline", action="store_true", help="estimated times of prompts and decode steps")
    group.add_argument("--card", choices=tuple(CARDS), help="whose rates; default: npu.soc")
    group.add_argument("--context", type=int, action="append", metavar="TOKENS", help="with the answer; repeatable")
    group.add_argument("--sequences", type=int, action="append", metavar="N", help="at once; repeatable")


def estimate_lines(cluster: ClusterConfig, options: argparse.Namespace) -> Iterator[str]:
    """Every pool's times. Raises ConfigError where no card is known, or a length or number is none.

    ``cluster`` is resolved; ``options`` has what ``add_arguments`` adds.
    """
    card, model = card_for(cluster, options.card), ModelConfig.load(cluster.model.path)
    rates = rates_of(card, cards_per_node=cluster.devices_per_node)
    yield rates_line(card, rates)
    for role, pool in pools(cluster):
        spec = instance_spec(cluster, pool.instances[0].name)
        lengths = positive("context", options.context) or usual_lengths(spec)
        if role != "decode":
            yield from _prompts(spec, model, rates=rates, lengths=lengths)
        if role != "prefill":
            counts = positive("sequences", options.sequences) or usual_counts(spec)
            yield from _steps(spec, model, rates=rates, lengths=lengths, counts=counts)


def card_for(cluster: ClusterConfig, name: str | None) -> Card:
    """The named card, or that of the cluster. Raises ConfigError where there is none."""
    card = CARDS[name] if name is not None else card_of(cluster)
    if card is None:
        text = f"device={cluster.device}: there are no rates for it; name a card with --card ({', '.join(CARDS)})"
        raise ConfigError(text, param="device")
    return card


def rates_line(card: Card, rates: Rates) -> str:
    """What the numbers start from."""
    reached = rates.attained
    parts = (
        f"{reached.matmul:.0%} of {card.bf16_tflops.value:g} TFLOP/s in bf16 and {card.int8_tops.value:g} TOP/s in int8",
        f"{reached.hbm:.0%} of {card.hbm_gb_s.value:g} GB/s",
        f"{reached.link:.0%} of {card.inside_gb_s.value:g} GB/s inside a node and {card.between_gb_s.value:g} between",
    )
    return f"estimated for {card.name}, not measured: {', '.join(parts)}"


def positive(name: str, values: Sequence[int] | None, *, most: int = MOST) -> tuple[int, ...]:
    """Numbers of an option that was given, ascending. Raises ConfigError for what is none."""
    for value in values or ():
        if not 1 <= value <= most:
            raise ConfigError(f"--{name} {value}: must be from 1 to {most}", param=name)
    return tuple(sorted(set(values or ())))


def usual_lengths(spec: InstanceSpec) -> tuple[int, ...]:
    """Some lengths, and the longest."""
    longest = spec.engine.max_model_len
    return (*(length for length in LENGTHS if length < longest), longest)


def usual_counts(spec: InstanceSpec) -> tuple[int, ...]:
    """A sequence for each group, and all slots."""
    return tuple(sorted({min(spec.parallel.dp_size, spec.engine.max_num_seqs), spec.engine.max_num_seqs}))


def cause_text(estimate: Estimate, *, shown: int = SHOWN) -> str:
    """``links of experts 9.1, HBM of projections 3.2, …`` in milliseconds; what others hide is at the end."""
    found = [f"{cause} {seconds * 1e3:.1f}" for cause, seconds in estimate.causes if seconds * 1e3 >= 0.05][:shown]
    if estimate.beside_s * 1e3 >= 0.05:
        found.append(f"experts beside the rest -{estimate.beside_s * 1e3:.1f}")
    return ", ".join(found)


def _prompts(spec: InstanceSpec, model: ModelConfig, *, rates: Rates, lengths: Sequence[int]) -> Iterator[str]:
    yield ""
    yield f"{spec.role} {spec.name}: one prompt through an idle instance, and what always full pipelines finish"
    for length in lengths:
        one = prefill(spec, model, rates=rates, prompts=1, length=length)
        together = max(spec.engine.max_num_batched_tokens // length, 1) * spec.parallel.dp_size
        many = one if together == 1 else prefill(spec, model, rates=rates, prompts=together, length=length)
        rate = together * length / many.busiest_s
        yield f"  {length:>9} tokens: {one.estimate.seconds * 1e3:9.1f} ms; {rate:9.0f} tokens/s"
        yield f"            {cause_text(one.estimate)}"


def _steps(
    spec: InstanceSpec, model: ModelConfig, *, rates: Rates, lengths: Sequence[int], counts: Sequence[int]
) -> Iterator[str]:
    drafts = spec.engine.num_draft_tokens
    tokens = 1 + rates.attained.accepted * drafts
    yield ""
    note = f"; {tokens:.1f} tokens a step, if {rates.attained.accepted:.0%} of {drafts} drafts hold" if drafts else ""
    yield f"{spec.role} {spec.name}: one decode step{note}"
    for length in lengths:
        for count in counts:
            step = decode_step(spec, model, rates=rates, sequences=count, context=length)
            speed = f"{step.seconds * 1e3 / tokens:.2f} ms a token, {count * tokens / step.seconds:.0f} tokens/s in all"
            yield f"  {count:>5} sequences of {length:>9} tokens: {step.seconds * 1e3:8.2f} ms; {speed}"
            yield f"            {cause_text(step)}"
