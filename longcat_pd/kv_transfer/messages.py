"""The records of a hand-over: between the two drivers, and between a driver and its own ranks. Plain data for ``wire.py``.

P connects to D's control port (http_port + 1). The life of a transfer::

    P -> Offer      D -> Grant | Refuse      P -> Commit      D -> Ack
    either -> Abort at any time

Token ids and block lists are little-endian int32 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First record on a link and at each new incarnation. ``hello.mismatches`` says which fields must agree.

    ``pairs_within_s``: after so long without its half of a pair (the offer, or the answer to one) this side has given up.
    ``acks_within_s``: so long a decode side may take from the last byte sent to its acknowledgement.
    """

    name: str
    role: str
    incarnation: str
    wire_version: int
    code_version: str
    model_digest: str
    tokenizer_digest: str
    block_size: int
    cache_entries: tuple[tuple[str, int, str], ...]
    digest_mode: str
    max_model_len: int
    pp_size: int
    cp_size: int
    dp_size: int
    kvp_size: int
    layers_per_stage: tuple[int, ...]  # whose cache travels: with the draft layer in the last stage where drafts are on
    device: str
    lane_host: str = ""
    lane_port: int = 0
    num_draft_tokens: int = 0
    pairs_within_s: float = 70.0
    acks_within_s: float = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Heartbeat of a driver."""

    name: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """P has room for this prompt. ``seed``, ``max_tokens`` and ``grammar`` are resolved by P, so that both sides use the
    same. ``num_said``: so many ids at the end of the prompt belong to the answer, of which ``max_tokens`` are to come.
    """

    transfer_id: str
    request_id: str
    incarnation: str
    token_ids: bytes
    max_tokens: int
    seed: int
    deadline_ms: int
    grammar: str = ""
    num_said: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """D has reserved: group, blocks by number (local ids on the rank that BlockSplit names), start of the split.

    The contents of the blocks before ``first_block`` are there already; they are not to be sent.
    """

    transfer_id: str
    incarnation: str
    group: int
    blocks: bytes
    split_start: int
    generation: int
    first_block: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """D does not take the offer: an error code of errors.py and a message."""

    transfer_id: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftState:
    """What the first drafts start from: the target's final hidden state of the prompt's last position, as raw numbers."""

    hidden: bytes
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Prefill is done: the first token with its log-probs, and what drafts start from. The lanes may still be draining.

    ``num_cached_tokens``: leading tokens of the prompt that P did not have to compute.
    """

    transfer_id: str
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    draft_state: DraftState | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """Everything has arrived; P may free."""

    transfer_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """This side has given the transfer up. ``reason`` is for the log; ``peer_gone`` marks an echo."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Where a prefill rank sends the cache of a slot: the grant of the decode side.

    ``blocks[b]`` is the local id of the sequence's block number b on the decode rank that ``BlockSplit(kvp_size,
    block_size, split_start)`` names; those ranks are ``first_rank + kvp_rank`` of instance ``peer``. Nothing before
    ``first_block`` is sent.
    """

    transfer_id: str
    peer: str
    peer_incarnation: str
    lane_host: str
    lane_port: int
    kvp_size: int
    first_rank: int
    blocks: bytes
    split_start: int = 0  # of the decode side's split
    generation: int
    first_block: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Announces a transfer to the decode ranks of a group before it is granted: these blocks are reserved for it.

    Those before ``first_block`` are not: other sequences may read them, and nothing comes for them. ``grammar``: of the
    answer, to be read meanwhile.
    """

    transfer_id: str
    group: int
    peer: str
    peer_incarnation: str
    source_cp_size: int
    source_layers: tuple[int, ...]  # layers of each source stage, with the draft layer if it travels
    prompt_len: int
    blocks: bytes  # as in Push; covers the whole reservation of the sequence
    split_start: int
    source_split_start: int = 0  # of BlockSplit(source_cp_size)
    generation: int
    first_block: int = 0
    grammar: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferClosed:
    """A rank's part of a transfer is over: its lanes are quiet, nothing more is read from or written to its blocks.

    ``ok``: everything was sent (prefill side) or has arrived and was checked (decode side). ``bytes_before_last_layer``:
    bytes that had left when the last layer of the last chunk was computed.
    """

    transfer_id: str
    rank: int
    ok: bool
    reason: str = ""
    num_bytes: int = 0
    bytes_before_last_layer: int = 0


ControlMessage = Hello | Beat | Offer | Grant | Refuse | Commit | Ack | Abort
