"""Rows about the decode step itself, without driver and face: compiled, with drafts, in int8; and what compiling costs.

Runners that are compared are in one process and take turns, block by block, with the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from longcat_pd.bench.orders import Order, Runners, Setup, Took, runners
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import make_checkpoint, quantized

SLOTS, MAX_LEN, BLOCK = 8, 640, 16
ROOM = SLOTS * (MAX_LEN // BLOCK + 1) + 1
ENGINE = (
    f"engine.block_size={BLOCK}",
    f"engine.max_num_seqs={SLOTS}",
    f"engine.max_model_len={MAX_LEN}",
    f"engine.num_blocks={ROOM}",
)
BATCHES = (1, 8)
MODES = ("eager", "inductor")
DRAFTS = (0, 3)
ROUNDS = 5
LENGTH, NUM_TOKENS, CHUNK = 32, 48, 512
WIDE_TOKENS = 12  # a wide step takes long enough
# wide enough that the matrices, not the number of operators, are what a step takes
WIDE = ("hidden_size=1024", "num_layers=2", "ffn_hidden_size=2048", "expert_ffn_hidden_size=1024", "n_routed_experts=8")

Blocks = dict[str, list[Took]]


def step_rows(folder: Path) -> Iterator[Row]:
    """Cold and warm starts, then eager against compiled with and without drafts."""
    chat = make_checkpoint(folder / "tiny-chat", "chat", dtype="float32")
    drafted = make_checkpoint(folder / "tiny-predictable", "2.0", dtype="float32", is_predictable=True)
    yield from start_rows(_setup(chat, "inductor", 0, folder), _setup(chat, "eager", 0, folder), folder=folder)
    setups = [_setup(drafted, mode, drafts, folder) for drafts in DRAFTS for mode in MODES]
    _compile([setup for setup in setups if setup.name.startswith("inductor")], folder)
    with _ready([_setup(chat, mode, 0, folder) for mode in MODES], folder) as found:
        for batch in BATCHES:
            yield compiled_row(f"batch {batch}, chat", in_turn(found, ["inductor 0", "eager 0"], batch=batch))
    with _ready(setups, folder) as found:
        for batch in BATCHES:
            blocks = in_turn(found, [setup.name for setup in setups], batch=batch)
            for drafts in DRAFTS:
                yield compiled_row(f"batch {batch}, 2.0 predictable, drafts {drafts}", blocks, drafts=drafts)
            for mode in MODES:
                yield drafts_row(f"batch {batch}, 2.0 predictable, {mode}", blocks, mode=mode, batch=batch)


def start_rows(compiled: Setup, eager: Setup, *, folder: Path) -> Iterator[Row]:
    """From the command to a step that is ready: compiled, from the cache, and without any compiler."""
    cold, warm, plain = (_start_s(setup, folder) for setup in (compiled, compiled, eager))
    what = "rank process until ready, chat, compiled steps from the cache"
    yield compared(what, [warm], [cold], unit="s", them="compiling them")
    yield compared(what, [warm], [plain], unit="s", them="eager")


def int8_rows(folder: Path) -> Iterator[Row]:
    """int8 against the same checkpoint in the data type that the rest of it keeps."""
    wide = make_checkpoint(folder / "wide-chat", "chat", dtype="float32", overrides=WIDE)
    stored = {"float": wide, "int8": quantized(wide, folder / "wide-chat-int8")}
    for dtype in ("float32", "bfloat16"):
        settings = (*ENGINE, f"model.dtype={dtype}", f"engine.max_num_batched_tokens={CHUNK}")
        setups = [Setup(name=name, model=str(path), settings=settings) for name, path in stored.items()]
        with _ready(setups, folder) as found:
            for batch in BATCHES:
                blocks = in_turn(found, stored, batch=batch, num_tokens=WIDE_TOKENS)
                yield int8_row(f"decode step, batch {batch}", blocks, dtype=dtype)
            chunks = in_turn(found, stored, batch=1, length=CHUNK, num_tokens=0)
            yield int8_row(f"prompt chunk of {CHUNK}", chunks, dtype=dtype)


def compiled_row(what: str, blocks: Blocks, *, drafts: int = 0) -> Row:
    """Milliseconds of a step, as one graph and as it stands."""
    ours, other = [[took.step_s for took in blocks[f"{mode} {drafts}"]] for mode in ("inductor", "eager")]
    return compared(f"decode step, {what}, inductor", ours, other, unit="ms", them="eager")


def drafts_row(what: str, blocks: Blocks, *, mode: str, batch: int) -> Row:
    """Tokens per second with and without drafts, and how many tokens a step brings to a sequence."""
    ours, other = [blocks[f"{mode} {drafts}"] for drafts in (DRAFTS[1], DRAFTS[0])]
    rates, others = [[took.rate for took in found] for found in (ours, other)]
    brings = sum(took.tokens for took in ours) / sum(took.steps for took in ours) / batch
    said = f"tokens/s, {DRAFTS[1]} drafts, {what} ({brings:.2f} tokens a step)"
    return compared(said, rates, others, unit="", them="no drafts")


def int8_row(what: str, blocks: Blocks, *, dtype: str) -> Row:
    """Milliseconds of a step."""
    ours, other = [[took.step_s for took in blocks[name]] for name in ("int8", "float")]
    return compared(f"{what}, chat of hidden size 1024, int8", ours, other, unit="ms", them=dtype)


def in_turn(
    found: Runners, names: Iterable[str], *, batch: int, length: int = LENGTH, num_tokens: int = NUM_TOKENS
) -> Blocks:
    """Blocks of each runner, in turn with the same prompts; the first of each warms up."""
    blocks: Blocks = {name: [] for name in names}
    for seed in range(1 + ROUNDS):
        for name, took in blocks.items():
            order = Order(name=name, batch=batch, length=length, num_tokens=num_tokens, seed=seed)
            took.append(found.take(order))
    return {name: took[1:] for name, took in blocks.items()}


def _setup(model: Path, mode: str, drafts: int, folder: Path) -> Setup:
    """Named "mode drafts". A cache for each compiled step, the compiler's own inside: what is cold is cold."""
    settings = [*ENGINE, "model.dtype=float32", f"engine.exe_mode={mode}", f"engine.num_draft_tokens={drafts}"]
    if mode != "eager":
        cache = folder / f"compiled-{model.name}-{drafts}"
        settings += [f"engine.buckets={list(BATCHES)}", f"engine.compile_cache={cache}"]
    return Setup(name=f"{mode} {drafts}", model=str(model), settings=settings)


def _start_s(setup: Setup, folder: Path) -> float:
    with runners([setup], folder=folder) as found:
        return found.wait_until_ready()


def _compile(setups: Sequence[Setup], folder: Path) -> None:
    """At the same time, since nobody measures it."""
    with ExitStack() as stack:
        for found in [stack.enter_context(runners([setup], folder=folder)) for setup in setups]:
            found.wait_until_ready()


@contextmanager
def _ready(setups: Sequence[Setup], folder: Path) -> Iterator[Runners]:
    with runners(setups, folder=folder) as found:
        found.wait_until_ready()
        yield found
