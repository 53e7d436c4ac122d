"""Every section of the cluster YAML as a frozen record. Data only: reading and checking is ``resolve.py``.

Each part of the system is given its own section and nothing more. Field names are the YAML keys. What may be left to
the machine ("auto") has the type ``... | None`` here only where the resolver keeps None; otherwise the resolver fills it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["prefill", "decode", "standalone"]


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which checkpoint, and how its text is treated."""

    path: str
    served_name: str = ""  # resolved: the folder's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["checkpoint", "random"] = "checkpoint"  # random: from config.json alone, for measuring
    default_max_tokens: int = 32768
    tool_parser: Literal["auto", "longcat", "longcat_xml", "none"] = "auto"
    reasoning_parser: Literal["auto", "longcat", "none"] = "auto"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one instance is split over its ranks. Unset sizes are 1.

    Ranks are numbered pp x dp x cp x attn_tp, the last one fastest. The sizes below ``attn_tp_size`` are of groups of
    neighbours in a pipeline stage, each independent of the others; ``o_proj`` follows ``attn_tp_size``.
    """

    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    kvp_size: int = 1
    attn_tp_size: int = 1
    dense_tp_size: int = 1  # the dense MLPs
    moe_tp_size: int = 1  # every expert; not together with ep_size
    ep_size: int = 1  # the experts, each whole on one rank
    embed_tp_size: int = 1  # rows of the word embedding
    lmhead_tp_size: int = 1  # rows of the head
    ngram_embed_tp_size: int = 0  # rows of the n-gram tables; resolved: as embed_tp_size
    ngram_tables: Literal["device", "host"] = (
        "device"  # memory that holds the rows; host: looked up there, outside of graphs
    )
    moe_dispatch: Literal["gather", "all_to_all", "two_level", "fused"] = "gather"
    node_size: int = 0  # nodes that the ranks of one ep group lie on, for two_level; resolved: by devices_per_node
    layers_per_stage: tuple[int, ...] = ()  # resolved: even, larger stages first

    @property
    def world_size(self) -> int:
        """Ranks of one instance."""
        return self.pp_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp_size * self.cp_size * self.group_size

    @property
    def group_size(self) -> int:
        """Ranks of one group: those that have the same rows of attention, apart from cp."""
        return max(self.kvp_size, self.attn_tp_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Memory, batch sizes and limits of one instance."""

    block_size: int = 128
    max_model_len: int = 0  # resolved: the checkpoint's max_position_embeddings; tokens of prompt + answer
    max_num_seqs: int = 64  # slots of the whole instance
    max_num_batched_tokens: int = 16384  # tokens of one group in one prefill plan
    num_draft_tokens: int = 0  # drafts of each decode window; above 0 a prefill pool computes the draft layer's cache
    # of the decode step, by device (npu_checks.GRAPHS); prompts are computed eagerly
    exe_mode: Literal["eager", "inductor", "ge_graph", "npugraph_ex"] = "eager"
    buckets: tuple[int, ...] = ()  # sequences of a group that a compiled step has room for; resolved: 1 and all of them
    compile_cache: str = ""  # folder of compiled steps; "" is ~/.cache/longcat_pd/compiled
    num_blocks: int = 0  # blocks of a cache shard, block 0 included; npu: to be given; resolved: what 256 MiB a rank hold
    unfused: tuple[Literal["attention", "experts", "norms", "prolog"], ...] = ()  # slow twins instead, to compare with
    prefix_cache: bool = True  # prompts that begin alike share their leading blocks; the tokens do not depend on it
    max_queued_requests: int = 512
    queue_timeout_s: float = 60.0
    step_timeout_s: float = 120.0
    rank_lost_s: float = 10.0
    drain_timeout_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class InstanceConfig:
    """One driver and its ranks. Ports count up from ``http_port``: ``checks.INSTANCE_PORTS``.

    ``nodes``: addresses of its machines, each with the same number of neighbouring ranks, in their order; the driver is on
    the first. ``env``: as in ``ClusterConfig``, for this instance alone.
    """

    name: str
    http_port: int
    nodes: tuple[str, ...] = ("127.0.0.1",)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Address of the driver: the first node."""
        return self.nodes[0]

    @property
    def url(self) -> str:
        """Where the driver is found."""
        return http_url(self.host, self.http_port)


def http_url(host: str, port: int) -> str:
    """Where a service that listens there is found."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """All instances of one role; they are alike."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    instances: tuple[InstanceConfig, ...] = ()
    env: dict[str, str] = field(default_factory=dict)  # as in ClusterConfig, for this pool alone

    @property
    def num_graphs(self) -> int:
        """Graphs that each rank compiles: of a split head one more for each size, and those that a device's step is cut
        into (``engine/step_parts.py``).
        """
        mode, drafts = self.engine.exe_mode, self.engine.num_draft_tokens
        cuts = {"npugraph_ex": 2, "ge_graph": 1 + drafts if drafts else 2}.get(mode, 0)
        return len(self.engine.buckets) * (1 + (self.parallel.lmhead_tp_size > 1) + cuts)


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The hand-over of cache between pools."""

    transport: Literal["process_group", "loopback"] = "process_group"
    timeout_s: float = 60.0
    connect_timeout_s: float = 10.0  # until a new lane stands; cards that meet for the first time may need minutes
    pairing_timeout_s: float = 10.0
    digest: Literal["off", "sample", "all"] = "off"


@dataclass(frozen=True, kw_only=True)
class LoadBalancerConfig:
    """The public face. ``host``: where it listens; ``node``: the machine that it runs on.

    ``failover``: an answer whose instance dies is finished by another pair, once a request.
    """

    host: str = "127.0.0.1"
    node: str = ""  # resolved: the last node of the last prefill instance
    port: int = 8081
    retry: int = 1
    failover: bool = True
    max_inflight: int = 4096
    max_body_bytes: int = 33554432
    request_timeout_s: float = 3600.0
    keepalive_comment_s: float = 0.0
    api_key_file: str | None = None
    admin_key_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class HcclOptions:
    """Of the process group of one axis. What is None or empty is as HCCL has it, by its environment variables."""

    buffer_mb: int | None = None  # of each direction; A3 alone has it by group
    buffer_name: str = ""  # groups of one name share their buffer, and must not communicate at once
    expansion_mode: Literal["default", "host_ts", "aicpu", "aiv", "aiv_only"] = "default"
    algorithm: str = ""
    exec_timeout_s: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None


@dataclass(frozen=True, kw_only=True)
class HcclConfig:
    """Options by axis. ``fused``: the communicator that the fused dispatch and combine have for themselves."""

    pp: HcclOptions = field(default_factory=HcclOptions)
    cp: HcclOptions = field(default_factory=HcclOptions)
    kvp: HcclOptions = field(default_factory=HcclOptions)
    attn_tp: HcclOptions = field(default_factory=HcclOptions)
    dense_tp: HcclOptions = field(default_factory=HcclOptions)
    moe_tp: HcclOptions = field(default_factory=HcclOptions)
    ep: HcclOptions = field(default_factory=HcclOptions)
    node: HcclOptions = field(default_factory=HcclOptions)
    local: HcclOptions = field(default_factory=HcclOptions)
    embed_tp: HcclOptions = field(default_factory=HcclOptions)
    lmhead_tp: HcclOptions = field(default_factory=HcclOptions)
    ngram_embed_tp: HcclOptions = field(default_factory=HcclOptions)
    fused: HcclOptions = field(default_factory=HcclOptions)


@dataclass(frozen=True, kw_only=True)
class NpuConfig:
    """What only NPU have. Shares of cores count while the experts run beside the rest; 0 sets no limit."""

    soc: Literal["A2", "A3"] = "A2"
    is_moe_overlapped: bool = False  # the experts of a layer on a stream beside its second attention
    moe_cube_cores: int = 12
    moe_vector_cores: int = 24
    main_cube_cores: int = 12
    main_vector_cores: int = 24
    is_prefetched: bool = False  # weights to the cache of the chip before they are needed
    comm_alg: Literal["", "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy"] = ""  # of the fused dispatch and combine
    hccl: HcclConfig = field(default_factory=HcclConfig)


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The machines of a cluster, which are all alike, and how ``run_pd.sh`` reaches those that it does not run on.

    By ssh with keys, against known host keys. ``path``: a folder of each machine for code, logs and what was started;
    "" where all nodes are the machine itself, which then runs the tree that it has.
    """

    user: str = ""  # as are identity_file and known_hosts_file: left to the configuration of ssh if they are not given
    port: int = 22
    identity_file: str | None = None
    known_hosts_file: str | None = None
    connect_timeout_s: float = 10.0
    path: str = ""
    python: str = ""  # the interpreter there that has the packages; "": .venv of the tree, made when code is distributed
    setup_files: tuple[str, ...] = ()  # shell files that are sourced before a service starts, as CANN's set_env.sh
    keep_releases: int = 3
    cores_per_device: int = 0  # neighbouring processor cores that the rank of each device is bound to; 0: any


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Where instances that decode keep a bundle of each request, for `longcat-pd replay`. Sizes are bytes."""

    dir: str
    texts: bool = False  # prompts, answers and grammars as text too, and not as ids alone
    max_bytes: int = 16 << 20  # of one bundle; a longer one is not kept
    max_total_bytes: int = 1 << 30  # of all bundles in the folder; the oldest go first


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Where balancer and instances send a trace of each request, by OTLP over HTTP (``/v1/traces`` below ``endpoint``).

    ``sample``: the share of requests that have one, of those whose client does not say it.
    """

    endpoint: str
    sample: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One YAML. ``standalone`` replaces both pools in `serve` and `infer`.

    ``env`` is handed to the services that are started, and never read by them; that of a pool is laid over it, and that of
    an instance over both.
    """

    model: ModelSection
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    devices_per_node: int = 16
    prefill: PoolConfig | None = None
    decode: PoolConfig | None = None
    standalone: PoolConfig | None = None
    load_balancer: LoadBalancerConfig = field(default_factory=LoadBalancerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    npu: NpuConfig = field(default_factory=NpuConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    device_memory_gib: float = 0.0  # that ranks may take of a device; 0: as sizing/cards.py has it for npu.soc
    cluster_key_file: str | None = None
    faults: bool = False  # switches for faults, by /admin/fault (docs/faults.md); for tests on CPU
    record: RecordConfig | None = None
    tracing: TracingConfig | None = None
    env: dict[str, str] = field(default_factory=dict)
    log_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Another instance as this one knows it."""

    name: str
    role: Role
    host: str
    http_port: int


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """All that one instance (driver and ranks) is told; a rank gets it as one JSON string."""

    name: str
    role: Role
    host: str
    http_port: int
    device: Literal["cpu", "cuda", "npu"]
    model: ModelSection
    parallel: ParallelConfig
    engine: EngineConfig
    transfer: TransferConfig
    npu: NpuConfig = field(default_factory=NpuConfig)
    nodes: tuple[str, ...] = ()  # none: all on the machine of the driver
    device_memory_gib: float = 0.0
    cores_per_device: int = 0
    ranks_before: tuple[int, ...] = ()  # of other instances on each of its nodes, whose cores come first; none: no others
    env: dict[str, str] = field(default_factory=dict)  # what its processes are given, which the memory plan looks at
    peers: tuple[PeerAddress, ...] = ()
    cluster_key_file: str | None = None
    faults: bool = False
    record: RecordConfig | None = None  # None where nothing is decoded
    tracing: TracingConfig | None = None
    config_digest: str = ""

    @property
    def ranks_host(self) -> str:
        """Where the driver and its ranks meet. A standalone engine has them to itself, wherever clients reach it."""
        return "127.0.0.1" if self.role == "standalone" else self.host

    @property
    def ranks_per_node(self) -> int:
        """Neighbouring ranks that share a machine."""
        return self.parallel.world_size // max(len(self.nodes), 1)


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that one rank process is told, as one JSON string. Endpoints are ZeroMQ addresses of the driver."""

    instance: InstanceSpec
    rank: int
    incarnation: str
    plan_endpoint: str
    output_endpoint: str
    rendezvous_host: str
    rendezvous_port: int

    @property
    def local_rank(self) -> int:
        """Its place on its node."""
        return self.rank % self.instance.ranks_per_node

    @property
    def node_rank(self) -> int:
        """The place of its node among those of the instance."""
        return self.rank // self.instance.ranks_per_node

    @property
    def identity(self) -> bytes:
        """Under which the driver's sockets know this rank. Another life of it is a stranger to them."""
        return f"{self.incarnation}.{self.rank}".encode()
