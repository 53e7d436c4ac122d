"""The metrics of the contract in our own words, and what a scrape of each kind of process has to show of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIX = "longcat_pd_"
BALANCER, PREFILL, DECODE, ALONE = "load_balancer", "prefill", "decode", "standalone"
KINDS = (BALANCER, PREFILL, DECODE, ALONE)
ENGINES = (PREFILL, DECODE, ALONE)
ANSWERING = (BALANCER, DECODE, ALONE)
GENERATING = (DECODE, ALONE)
PEERED = (PREFILL, DECODE)

_TRANSFERS = ("committed", "aborted", "timed_out", "digest_mismatch", "peer_lost")
_BLOCKS = ("free", "cached", "reserved", "live", "quarantined")
_PHASES = ("prefill", "decode")
_CAUSES = ("client", "load", "self", "peer")


@dataclass(frozen=True)
class Row:
    """One metric: ``labels`` maps those beside role and instance to their closed sets; an empty set is an open one.

    ``on``: the kinds of process that show it; all of them can move it.
    """

    name: str
    kind: str
    on: tuple[str, ...] = KINDS
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """As the parser calls it."""
        return PREFIX + self.name.removesuffix("_total")

    @property
    def label_names(self) -> set[str]:
        """All that a query may name."""
        return {"role", "instance", *self.labels, *(("le",) if self.kind == "histogram" else ())}

    @property
    def series(self) -> set[str]:
        """The names that a query may use."""
        parts = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return {f"{PREFIX}{self.name}{part}" for part in parts}

    def values(self, label: str) -> tuple[str, ...]:
        """The closed set of a label; empty for an open one."""
        return {"role": KINDS, "phase": _PHASES, **self.labels}.get(label, ())


TABLE = (
    Row("build_info", "gauge", labels={"version": (), "model_digest": (), "wire_version": ()}),
    Row("ready", "gauge"),
    Row("draining", "gauge"),
    Row("http_requests_total", "counter", labels={"route": (), "status": ()}),
    Row("http_request_seconds", "histogram", labels={"route": (), "status": ()}),
    Row("inflight_requests", "gauge"),
    Row("requests_total", "counter", labels={"outcome": ()}),
    Row("prompt_tokens_total", "counter"),
    Row("output_tokens_total", "counter", ANSWERING),
    Row("cached_tokens_total", "counter"),
    Row("queue_seconds", "histogram"),
    Row("prefill_seconds", "histogram", (BALANCER, PREFILL, ALONE)),
    Row("transfer_seconds", "histogram", (BALANCER, *PEERED)),
    Row("first_token_seconds", "histogram", ANSWERING),
    Row("per_token_seconds", "histogram", ANSWERING),
    Row("request_seconds", "histogram"),
    Row("step_seconds", "histogram", ENGINES, {"phase": _PHASES}),
    Row("driver_step_seconds", "histogram", ENGINES, {"phase": _PHASES}),
    Row("step_wait_seconds", "histogram", GENERATING),
    Row("step_compute_seconds", "histogram", GENERATING),
    Row("draft_tokens_total", "counter", GENERATING),
    Row("accepted_tokens_total", "counter", GENERATING),
    Row("sequences", "gauge", ENGINES, {"state": ("waiting", "running")}),
    Row("blocks", "gauge", ENGINES, {"state": _BLOCKS}),
    Row("slots", "gauge", ENGINES, {"state": ("free", "used")}),
    Row("ranks", "gauge", ENGINES, {"state": ("ok", "silent", "lost")}),
    Row("compilations", "gauge", ENGINES),
    Row("transfers_open", "gauge", PEERED),
    Row("transfers_total", "counter", PEERED, {"outcome": _TRANSFERS}),
    Row("transfer_bytes_total", "counter", PEERED),
    Row("transfer_early_bytes_total", "counter", (PREFILL,)),
    Row("cancels_total", "counter", labels={"from": ("client", "deadline", "peer", "drain")}),
    Row("legs_open", "gauge", (BALANCER,), {"leg": _PHASES}),
    Row("leg_failures_total", "counter", (BALANCER,), {"leg": _PHASES, "cause": _CAUSES}),
    Row("retries_total", "counter", (BALANCER,)),
    Row("failovers_total", "counter", (BALANCER,), {"outcome": ("completed", "failed", "no_pair")}),
    Row("instance_ready", "gauge", (BALANCER,), {"target": ()}),
    Row("breaker_open", "gauge", (BALANCER,), {"target": ()}),
)
TRACED = Row("trace_spans_total", "counter", labels={"outcome": ("exported", "dropped")})  # with a collector alone
BY_FAMILY = {row.family: row for row in (*TABLE, TRACED)}
BY_SERIES = {name: row for row in (*TABLE, TRACED) for name in row.series}


@dataclass(frozen=True)
class Scrape:
    """What one process showed: families but those that only say when others began to count, and samples that are not 0."""

    families: set[str]
    moved: set[str]


def scraped(text: str, *, kind: str, instance: str) -> Scrape:
    """Read by the official parser and compared with the table: names, types, labels and their values, nothing twice."""
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared)), f"a family twice: {sorted(declared)}"
    families: set[str] = set()
    moved: set[str] = set()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            assert family.name.removesuffix("_created") in BY_FAMILY, family.name
            continue
        row = BY_FAMILY[family.name]
        assert family.type == row.kind and family.documentation, family
        keys = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(keys) == len(set(keys)), f"a sample of {family.name} twice"
        for sample in family.samples:
            _check(sample, row, kind=kind, instance=instance)
        families.add(family.name)
        if any(sample.value for sample in family.samples):
            moved.add(family.name)
    return Scrape(families, moved)


def _check(sample: Sample, row: Row, *, kind: str, instance: str) -> None:
    assert sample.name in row.series, sample
    assert (sample.labels["role"], sample.labels["instance"]) == (kind, instance), sample
    assert set(sample.labels) == row.label_names - (set() if sample.name.endswith("_bucket") else {"le"}), sample
    for label, values in row.labels.items():
        assert not values or sample.labels[label] in values, sample


def families_of(kind: str) -> set[str]:
    """What a process of this kind has to show, no more and no less."""
    return {row.family for row in TABLE if kind in row.on}
