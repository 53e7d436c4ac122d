"""Who an instance is: a new incarnation at every start, and digests of what must be equal in both pools."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.kv_transfer.hello import Identity, make_hello
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.models.checkpoint import checkpoint_digest
from longcat_pd.version import VERSION

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def own_hello(spec: InstanceSpec, model: ModelConfig) -> Hello:
    """What this life of the instance says of itself. Raises ConfigError for a damaged checkpoint."""
    folder = Path(spec.model.path)
    identity = Identity(
        incarnation=secrets.token_hex(8),
        code_version=VERSION,
        model_digest=checkpoint_digest(folder, has_weights=spec.model.weights == "checkpoint"),
        tokenizer_digest=_files_digest(folder),
    )
    return make_hello(spec, model, identity)


def _files_digest(folder: Path) -> str:
    """Of the files that make ids from text and say how an answer is drawn; one that is missing counts as empty. Raises
    ConfigError for one that cannot be read.
    """
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        try:
            content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        except OSError as error:
            raise ConfigError(f"{folder / name}: cannot be read ({error.strerror})", param="model.path") from error
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
