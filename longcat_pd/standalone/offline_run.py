"""``longcat-pd infer --yaml``: a run of the offline dialect from its file to its table, over ranks in their own processes.

Owns the order of things, what is looked at before a rank starts, and what is printed. The dialect is
``config/offline.py``, prompts are ``dataset.py``, figures ``figures.py``.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from longcat_pd.config.offline import in_dialect, load
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import lacking
from longcat_pd.server.text import TextProcessor
from longcat_pd.sizing import preflight
from longcat_pd.standalone.batches import Batches
from longcat_pd.standalone.dataset import prompts
from longcat_pd.standalone.unattended import unattended


def run(model_name: str, path: str, overrides: Sequence[str], *, only_check: bool, out: TextIO) -> int:
    """Answer the prompts of one file of the dialect; the exit status. Raises ConfigError before any rank starts."""
    asked = load(path, overrides)
    if asked.model_name != model_name:
        raise ConfigError(f"--model {model_name}: {path} is for model_config.model_name={asked.model_name}")
    spec = unattended(asked.instance)
    found = preflight.inspect(spec)
    for line in found.plan:
        out.write(f"{line}\n")
    out.flush()
    findings = list(found.findings)
    if spec.model.weights == "checkpoint":
        findings += lacking(Path(spec.model.path), has_draft=spec.engine.num_draft_tokens > 0)
    if findings:
        raise ConfigError(in_dialect("\n".join(findings)))
    text = TextProcessor.load(spec.model.path)
    waiting = prompts(asked.data, asked.batch_size, text)
    if only_check:
        return 0
    if asked.keeps_compiled:
        return asyncio.run(Batches(asked, spec, text, out=out).answer(waiting))
    with tempfile.TemporaryDirectory(prefix="longcat-pd-compiled-") as folder:
        spec = replace(spec, engine=replace(spec.engine, compile_cache=folder))
        return asyncio.run(Batches(asked, spec, text, out=out).answer(waiting))
