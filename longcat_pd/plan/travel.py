"""What each rank of an instance sends in a full step, and what goes from machine to machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.sizing.links import LinkBytes, between_nodes, full_chunk, full_step, link_bytes, looked_up, token_bytes
from longcat_pd.sizing.steps import LargestStep


@dataclass(frozen=True, kw_only=True)
class Travel:
    """Of one instance.

    Attributes:
        links: by rank, of a full decode step, or of a full chunk that ends a prompt of full length.
        first_links: of a full chunk that begins a prompt; of decode as ``links``.
        pairs: bytes from node to node, by their places, as in ``links``.
        token_bytes: what the hand-over moves for each token.
    """

    links: tuple[LinkBytes, ...]
    first_links: tuple[LinkBytes, ...]
    pairs: Mapping[tuple[int, int], int]
    token_bytes: int


def travel(spec: InstanceSpec, model: ModelConfig) -> Travel:
    """``spec`` is resolved."""
    return _of_prompts(spec, model) if spec.role == "prefill" else _of_steps(spec, model)


def _of_steps(spec: InstanceSpec, model: ModelConfig) -> Travel:
    parallel, engine = spec.parallel, spec.engine
    ranks = range(parallel.world_size)
    step = full_step(spec, model, context=engine.max_model_len)
    num_rows = LargestStep.of_decode(spec).rows
    found = []
    for rank in ranks:
        to, back = looked_up(spec, model, rank, num_rows=num_rows)
        found.append(link_bytes(step, spec, rank, to_host=to, from_host=back))
    return Travel(
        links=tuple(found),
        first_links=tuple(found),
        pairs=between_nodes(step, spec, ranks),
        token_bytes=token_bytes(spec, model),
    )


def _of_prompts(spec: InstanceSpec, model: ModelConfig) -> Travel:
    """Stage by stage."""
    parallel, engine = spec.parallel, spec.engine
    short = min(engine.max_num_batched_tokens, engine.max_model_len)
    num_rows = LargestStep.of(spec).rows
    links: list[LinkBytes] = []
    first: list[LinkBytes] = []
    pairs: dict[tuple[int, int], int] = {}
    for stage in range(parallel.pp_size):
        ranks = range(stage * parallel.stage_size, (stage + 1) * parallel.stage_size)
        full = full_chunk(spec, model, stage, context=engine.max_model_len)
        begun = full_chunk(spec, model, stage, context=short)
        for pair, count in between_nodes(full, spec, ranks).items():
            pairs[pair] = pairs.get(pair, 0) + count
        for rank in ranks:
            to, back = looked_up(spec, model, rank, num_rows=num_rows)
            links.append(link_bytes(full, spec, rank, to_host=to, from_host=back))
            first.append(link_bytes(begun, spec, rank, to_host=to, from_host=back))
    return Travel(links=tuple(links), first_links=tuple(first), pairs=pairs, token_bytes=token_bytes(spec, model))
