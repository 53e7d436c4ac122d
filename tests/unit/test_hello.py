"""A driver says without torch what its ranks will cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.shipped import shipped_checkpoint
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_transfer.hello import cache_entries, fingerprint
from longcat_pd.server.identity import own_hello
from longcat_pd.tiny.configs import VARIANTS, make_config
from tests.unit.control_rig import hello


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_entries_are_those_of_the_ranks(variant: str) -> None:
    model = ModelConfig.from_dict(make_config(variant, (), dtype="float32"))
    spec = CacheSpec.of(model, range(model.num_layers), torch.bfloat16)
    assert cache_entries(model, "bfloat16") == tuple((e.name, e.width, "bfloat16") for e in spec.entries)


def test_an_indexer_that_is_shared_owns_fewer_entries() -> None:
    model = ModelConfig.from_dict(make_config("2.0", (), dtype="float32"))
    assert model.indexer is not None
    other = replace(model, indexer=None)
    assert len(cache_entries(model, "float32")) > len(cache_entries(other, "float32")) == 4 * model.num_layers


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        *((at, {"code_version": "0.2.0"}) for at in (0, 1)),
        *((at, {"device": "npu"}) for at in (0, 1)),
        (0, {"pp_size": 2}),
        (0, {"layers_per_stage": (1, 2)}),
        (1, {"kvp_size": 2}),
        (1, {"model_digest": "other"}),
        (1, {"cache_entries": (("latent.0", 8, "bfloat16"),)}),
    ],
)
def test_a_fingerprint_tells_code_model_device_and_the_layouts_of_both_sides(at: int, changes: dict[str, object]) -> None:
    pair = [hello("p0", "prefill"), hello("d0", "decode")]
    before = fingerprint(*pair)
    pair[at] = replace(pair[at], **changes)
    assert fingerprint(*pair) != before
    assert len({fingerprint(pair[0]), fingerprint(pair[1]), fingerprint(*pair)}) == 3


def test_a_fingerprint_is_that_of_the_pool_and_not_of_a_process() -> None:
    pair = fingerprint(hello("p0", "prefill"), hello("d0", "decode"))
    other = fingerprint(hello("p1", "prefill", lane_host="x", lane_port=8), hello("d7", "decode", incarnation="again"))
    assert pair == other


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_copies_that_make_other_ids_or_draw_otherwise_are_told_apart(name: str, tmp_path: Path) -> None:
    """Two pools over copies of one checkpoint, in one of which somebody has changed a file."""
    one, other = (shutil.copytree(shipped_checkpoint(), tmp_path / place) for place in ("one", "other"))
    config = ModelConfig.load(one)
    first, second = (own_hello(resolve.standalone(str(f), [], host="127.0.0.1", port=1), config) for f in (one, other))
    assert (first.model_digest, first.tokenizer_digest) == (second.model_digest, second.tokenizer_digest)
    (other / name).write_text((other / name).read_text() + "\n")
    changed = own_hello(resolve.standalone(str(other), [], host="127.0.0.1", port=1), config)
    assert changed.model_digest == first.model_digest and changed.tokenizer_digest != first.tokenizer_digest


def test_a_file_of_the_checkpoint_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the weights of another user may be read, and the tokenizer may not."""
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    folder = shipped_checkpoint()
    spec = resolve.standalone(str(folder), [], host="127.0.0.1", port=1)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match=r"/tokenizer\.json: cannot be read \(Permission denied\)"):
        own_hello(spec, ModelConfig.load(folder))
