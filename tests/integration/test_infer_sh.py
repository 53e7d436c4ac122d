"""`deploy/infer.sh` as a user runs it, over several ranks and tiny checkpoints that it makes itself.

The installation itself is not tried here: the script finds an up-to-date environment (that of the tests) through its stamp.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import Clone

LITE = ("--model", "longcat_flash_lite")
EP = ("--yaml", "longcat_flash_lite_rank_8_8ep_cpu.yaml")
SIZES = ("attn_tp_size", "dense_tp_size", "moe_tp_size", "embed_tp_size", "lmhead_tp_size", "world_size")
SHORT = ("model_config.dtype=float32", "scheduler_config.max_new_tokens=6")
ONE_RANK = (*(f"parallel_config.{name}=1" for name in SIZES), "model_config.custom_params.ngram_embed_tp_size=0")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def lite(clone: Clone) -> Path:
    """The checkpoint that the script makes for itself."""
    path = clone.path / ".run/models/tiny-lite"
    if not path.exists():
        assert infer(clone, *LITE, *EP, "--check").returncode == 0
    return path


def infer(clone: Clone, *arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return clone.run("infer.sh", *arguments, *(part for item in settings for part in ("--set", item)))


def answers(output: str) -> list[str]:
    return re.findall(r"^--- prompt .*\n(?:.*\n)*?(?=--- prompt|prompts )", output, flags=re.MULTILINE)


def test_the_lite_layout_answers_like_one_rank_and_tells_its_times(clone: Clone) -> None:
    """Two groups of two, four ranks of experts, head and tables over all."""
    done = infer(clone, *LITE, *EP, settings=SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp 2 x attn_tp 2, 4 ranks on cpu, float32" in done.stdout
    assert "ranks weights: begins\n" in done.stderr and "\x1b" not in done.stderr
    assert re.search(r"^ranks weights: \d+\.\d MB in \d+\.\d s$", done.stderr, flags=re.MULTILINE)
    assert re.search(r"^making a small random checkpoint in .*: done in \d+ s$", done.stderr, flags=re.MULTILINE)
    alone = infer(clone, *LITE, *EP, settings=(*SHORT, *ONE_RANK))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert len(answers(done.stdout)) == 2
    assert answers(done.stdout) == answers(alone.stdout)

    tokens = sum(int(count) for count in re.findall(r"tokens in, (\d+) out", done.stdout))
    assert f"prompts 2, batches 1, tokens in 96, tokens out {tokens}" in done.stdout
    rows = {line[:34].strip(): line[34:].split() for line in done.stdout.splitlines()}
    assert rows[""] == ["mean", "median", "min", "max"]
    for name in ("prefill of a prompt, ms", "first tokens of a whole batch, ms", "decode step, ms"):
        mean, median, least, most = (float(value) for value in rows[name])
        assert 0 < least <= min(mean, median) and max(mean, median) <= most
    assert float(rows["tokens/s while decoding"][0]) > 0
    assert rows["tokens per step and sequence"] == ["1.00"]
    assert rows["of which accepted drafts"] == ["0.00"]


def test_drafts_of_chat_over_ranks_leave_the_text_alone(clone: Clone) -> None:
    """Four groups of one, dense MLPs over two of them, and answers in more batches than one."""
    lines = clone.path / "lines.jsonl"
    records = [{"context": "one two three " * 20, "input": "What?", "answers": []}, {"context": "", "input": "Who?"}]
    lines.write_text("\n".join(json.dumps(record) for record in records * 3))
    chat = ("--model=longcat_flash", "--yaml=longcat_flash_rank_32_32ep_densetp8_mtp_cpu.yaml")
    settings = (*SHORT, f"data_config.dataset={lines}", "scheduler_config.batch_size=4")
    done = infer(clone, *chat, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = infer(clone, *chat, settings=(*settings, *ONE_RANK, "model_config.next_n=0"))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert len(answers(done.stdout)) == 6
    assert answers(done.stdout) == answers(alone.stdout)
    assert "prompts 6, batches 2," in done.stdout


def test_a_check_starts_nothing_and_int8_is_made_for_it(clone: Clone) -> None:
    done = infer(clone, *LITE, "--yaml", "longcat_flash_lite_rank_8_8ep_w8a8_cpu.yaml", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 3: " in done.stdout and "--- prompt" not in done.stdout
    config = json.loads((clone.path / ".run/models/tiny-lite-w8a8/config.json").read_text())
    assert "quantization_config" in config


def test_what_cannot_work_ends_with_status_2_and_every_reason(clone: Clone) -> None:
    settings = ("parallel_config.attn_dp_size=3", "scheduler_config.batch_sise=2", "model_config.exe_mode=ge_graph")
    refused = infer(clone, *LITE, *EP, settings=settings)
    assert refused.returncode == 2
    assert "error: scheduler_config.batch_sise: unknown key" in refused.stderr
    assert "error: parallel_config: attn_tp_size 2 x attn_dp_size 3 = 6, but world_size=4" in refused.stderr
    assert "error: model_config.exe_mode=ge_graph: device=cpu has eager, inductor" in refused.stderr
    assert "Traceback" not in refused.stderr and not refused.stdout

    other = infer(clone, "--model", "longcat_flash", *EP)
    assert other.returncode == 2
    assert "is for model_config.model_name=longcat_flash_lite" in other.stderr

    npu = infer(clone, *LITE, "--yaml", "longcat_flash_lite_rank_8_8ep.yaml")
    assert npu.returncode == 2
    assert "device=npu" not in npu.stderr, "what it wants of the device is seen by its ranks"
    assert "error: model_config.model_path=/data/models/LongCat-Flash-Lite: " in npu.stderr

    assert infer(clone, *LITE, "--yaml", "no_such_file.yaml").returncode == 2


def test_missing_weights_are_told_before_a_rank_starts(clone: Clone, lite: Path) -> None:
    broken = clone.path / "broken"
    shutil.copytree(lite, broken)
    gone = sorted(broken.glob("*.safetensors"))[0]
    gone.unlink()
    refused = infer(clone, *LITE, *EP, settings=(f"model_config.model_path={broken}",))
    assert refused.returncode == 2
    assert f"error: model_config.model_path={broken}: 1 of " in refused.stderr and gone.name in refused.stderr
    assert "--- prompt" not in refused.stdout

    for file in broken.glob("*.safetensors*"):
        file.unlink()
    assert infer(clone, *LITE, *EP, settings=(f"model_config.model_path={broken}",)).returncode == 2


@pytest.mark.slow
def test_random_weights_of_several_ranks_are_those_of_one(clone: Clone, lite: Path) -> None:
    bare = clone.path / "bare"
    shutil.copytree(lite, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    random = (f"model_config.model_path={bare}", "model_config.with_ckpt=false", *SHORT)
    several, alone = (infer(clone, *LITE, *EP, settings=(*random, *more)) for more in ((), ONE_RANK))
    assert several.returncode == 0, several.stdout + several.stderr
    assert len(answers(several.stdout)) == 2
    assert answers(several.stdout) == answers(alone.stdout)


def test_a_file_of_bodies_is_answered_by_several_ranks_too(clone: Clone, lite: Path, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    lines.write_text("\n".join(json.dumps({**body, "prompt": [5 + number, 6, 7]}) for number in range(3)))
    command = [sys.executable, "-m", "longcat_pd.cli", "infer", "--model", str(lite), "--input", str(lines)]
    command += ["--dtype", "float32"]
    tokens = []
    for sizes in (("1", "1"), ("2", "2")):
        settings = ["--set", f"parallel.attn_tp_size={sizes[0]}", "--set", f"parallel.kvp_size={sizes[1]}"]
        done = subprocess.run(
            [*command, *settings], capture_output=True, text=True, timeout=120, check=False, cwd=clone.path
        )
        assert done.returncode == 0, done.stderr
        tokens.append([json.loads(line)["choices"][0]["token_ids"] for line in done.stdout.splitlines()])
    assert len(tokens[0]) == 3
    assert tokens[0] == tokens[1]


@pytest.mark.usefixtures("lite")
def test_a_run_that_is_told_to_end_leaves_no_folder(clone: Clone, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"input": "Who?"}\n' * 2000)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    custom = "model_config.custom_params.moe_aic_num=6"
    settings = [*SHORT, *ONE_RANK, f"data_config.dataset={lines}", custom]
    command = ["bash", str(clone.path / "deploy" / "infer.sh"), *LITE, *EP, *(p for s in settings for p in ("--set", s))]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, cwd=clone.path, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        seen = []
        for line in running.stdout:
            seen.append(line)
            if line.startswith("--- prompt 1 of"):
                break
        assert list(scratch.glob("longcat-pd-compiled-*"))
        running.terminate()
        rest = running.stdout.read()
        assert running.wait(timeout=60) == 3
    assert f"  of no effect on cpu: {custom}\n" in seen
    assert "tokens/s while decoding" not in rest
    assert not list(scratch.glob("longcat-pd-*"))


def test_the_plan_names_the_folder_that_graphs_go_to(clone: Clone, tmp_path: Path) -> None:
    inductor = ("model_config.exe_mode=inductor",)
    checked = infer(clone, *LITE, *EP, "--check", settings=inductor)
    assert checked.returncode == 0, checked.stderr
    assert re.search(r"kept in \S*/longcat-pd-compiled-", checked.stdout)
    keeps = ("model_config.enable_cache_compile=true", f"model_config.output_path={tmp_path / 'out'}")
    kept = infer(clone, *LITE, *EP, "--check", settings=(*inductor, *keeps))
    assert f"kept in {tmp_path / 'out' / 'compile_cache'}" in kept.stdout
    (tmp_path / "file").write_text("")
    wrong = (*inductor, keeps[0], f"model_config.output_path={tmp_path / 'file'}")
    refused = infer(clone, *LITE, *EP, "--check", settings=wrong)
    assert refused.returncode == 2 and "error: model_config.output_path=" in refused.stderr
