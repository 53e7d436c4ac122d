"""One rank's part of the model: its operators, its modules, its weights. Knows neither plans nor what is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.operators import operators_of, refusals
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.stage import Stage, data_type, stage_context
from longcat_pd.models.weights import digest_of, fill_weights, int8_names
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.progress.steps import Tell, untold


@dataclass(frozen=True, kw_only=True)
class StageOperators:
    """What a rank computes with, and the names of what its checkpoint stores in int8."""

    ops: kernels.Ops
    int8: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """What was built, the bytes of its weights as they were read, and what tells its checkpoint apart."""

    model: CausalLM
    weight_bytes: int
    digest: str


def stage_operators(instance: InstanceSpec, config: ModelConfig) -> StageOperators:
    """The table of a rank. Allocates nothing, so that sizes are refused before anything is.

    Raises:
        ConfigError: the checkpoint, the device or the configuration do not fit.
    """
    int8 = int8_names(instance.model)
    with refusals():
        ops = operators_of(instance, config, dtype=data_type(instance, config), int8=int8)
    return StageOperators(ops=ops, int8=int8)


def build_stage(
    instance: InstanceSpec,
    mesh: Mesh,
    *,
    stage: Stage,
    config: ModelConfig,
    cache: KVCache,
    operators: StageOperators,
    tell: Tell = untold,
) -> StageModel:
    """The modules of ``stage``, filled from the checkpoint. ``tell``: of its weights, as they come.

    Raises:
        ConfigError: the checkpoint or the configuration do not fit.
    """
    ops, int8 = operators.ops, operators.int8
    model = CausalLM(stage_context(stage, instance, config=config, mesh=mesh, ops=ops, cache=cache, int8=int8))
    weight_bytes = fill_weights(model.weight_specs(), instance.model, config=config, tell=tell)
    with refusals():
        model.prepare()
    return StageModel(model=model, weight_bytes=weight_bytes, digest=digest_of(instance.model))
