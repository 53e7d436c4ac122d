"""``longcat-pd infer --yaml``: a run of the offline dialect from its file to its table, over ranks in their own processes.

Owns the order of things, what is looked at before a rank starts, and what is printed. The dialect is
``config/offline.py``, prompts are ``dataset.py``, figures ``figures.py``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from longcat_pd.config.offline import OfflineRun, in_dialect, load
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import lacking
from longcat_pd.server.run import STATUS_CUT, STATUS_OK
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
    if asked.keeps_compiled:
        return _until_cancelled(_run(asked, unattended(asked.instance), only_check=only_check, out=out))
    with tempfile.TemporaryDirectory(prefix="longcat-pd-compiled-") as folder:
        engine = replace(asked.instance.engine, compile_cache=folder)
        spec = unattended(replace(asked.instance, engine=engine))
        return _until_cancelled(_run(asked, spec, only_check=only_check, out=out))


def _until_cancelled(work: Coroutine[Any, Any, int]) -> int:
    """The exit status of ``work``. One that a signal cancels has ended its ranks, and its folders end behind it."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        sys.stderr.write("stopped by a signal before the end\n")
        return STATUS_CUT


async def _run(asked: OfflineRun, spec: InstanceSpec, *, only_check: bool, out: TextIO) -> int:
    """Everything behind the file. ``spec``: of ``asked``, with its ports and the folder of compiled steps."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they count from where ranks are waited for
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    found = preflight.inspect(spec)
    for line in found.plan:
        out.write(f"{line}\n")
    if spec.engine.exe_mode != "eager" and not asked.keeps_compiled:
        out.write("  graphs of this run only; enable_cache_compile: true keeps them\n")
    if asked.idle:
        out.write(f"  of no effect on {spec.device}: {', '.join(asked.idle)}\n")
    out.flush()
    findings = list(found.findings)
    if spec.model.weights == "checkpoint":
        findings += lacking(Path(spec.model.path), has_draft=spec.engine.num_draft_tokens > 0)
    if findings:
        raise ConfigError(in_dialect("\n".join(findings)))
    text = TextProcessor.load(spec.model.path)
    waiting = prompts(asked.data, asked.batch_size, text)
    if only_check:
        return STATUS_OK
    return await Batches(asked, spec, text, out=out, progress=sys.stderr).answer(waiting)
