"""A face that asks the grammar library before the ranks have to."""

from __future__ import annotations

from collections.abc import Callable

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import Role
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.metrics import RequestMetrics
from longcat_pd.server.face import Face
from longcat_pd.server.gate import Gate
from longcat_pd.server.service import NOTHING, Kept, Service
from longcat_pd.server.text import TextProcessor


def checked_face(
    service: Service,
    text: TextProcessor,
    *,
    gate: Gate | None = None,
    metrics: RequestMetrics | None = None,
    kept: Kept = NOTHING,
) -> Face:
    """The face of an instance; arguments as ``Face``. Raises ConfigError for a tokenizer that cannot be read."""
    check = _check(service.model.path, service.role)
    return Face(service, text, gate=gate, metrics=metrics, kept=kept, check_grammar=check)


def _check(folder: str, role: Role) -> Callable[[str], str]:
    if role == "decode":  # its grammars come with hand-overs, from an instance that has asked
        return _taken
    model = ModelConfig.load(folder)
    vocabulary = Vocabulary.load(folder, model.vocab_size, model.eos_token_id)
    return _without_end if vocabulary is None else vocabulary.refusal


def _taken(_grammar: str) -> str:
    return ""


def _without_end(_grammar: str) -> str:
    """Without a tokenizer nobody gets here."""
    return "the checkpoint has no token that ends an answer"
