"""The training of the shipped checkpoint: its diet, its steps, and that it goes on where it was interrupted."""

from __future__ import annotations

import fcntl
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import open_checkpoint
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.server.text import TextProcessor
from tools.tiny import arithmetic, calling, export, feeding, recall
from tools.tiny.feeding import COPY, PAD, Curriculum, Feeder
from tools.tiny.recipe import CONFIG, LONGEST, NUM_DRAFTS, SHARES, Recipe
from tools.tiny.rendering import Renderer
from tools.tiny.training import Pace, Seen, Training
from tools.tiny.twin import Twin

RECIPE = Recipe(steps=8, pool=24, tokens_per_step=512, warmup_steps=2)
SMALL = CONFIG | {"hidden_size": 32, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 8, "q_lora_rank": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return export.text_files(tmp_path_factory.mktemp("tiny") / "text", seed=0)


LATER = Curriculum(copied=RECIPE.last_copy, pairs=3)  # all skills


@pytest.fixture
def feeder(text: TextProcessor) -> Feeder:
    return Feeder(RECIPE, Renderer(text), vocab_size=CONFIG["vocab_size"], longest=LONGEST)


def training_of(feeder: Feeder, recipe: Recipe = RECIPE) -> Training:
    torch.manual_seed(recipe.seed)
    training = Training(Twin(ModelConfig.from_dict(SMALL), longest=LONGEST), recipe, feeder)
    training.pace.curriculum = replace(LATER)
    return training


def test_a_prompt_is_what_the_server_makes_of_it_and_the_answer_ends(text: TextProcessor) -> None:
    example = arithmetic.cases()[0]
    rendered = Renderer(text)(example)
    assert text.template is not None
    prompt = text.template.render(example.messages, [], {"enable_thinking": False})
    assert list(rendered.prompt) == text.encode(prompt, adds_special=False)
    assert rendered.answer[-1] == CONFIG["eos_token_id"]
    assert text.raw(rendered.answer) == f"{example.answer.content}</longcat_s>"


def test_a_call_is_rendered_in_the_markup(text: TextProcessor) -> None:
    example = next(case for case in calling.cases() if case.answer.calls)
    (call,) = example.answer.calls
    answer = text.raw(Renderer(text)(example).answer)
    assert answer.startswith(f"<longcat_tool_call>{call.name}\n<longcat_arg_key>")
    assert answer.endswith("</longcat_tool_call></longcat_s>")


def test_the_same_pool_gives_the_same_documents_and_another_one_others(feeder: Feeder) -> None:
    now = Curriculum(copied=6, pairs=4)
    first, again, other = feeder(3, now), feeder(3, now), feeder(4, now)
    assert [batch.ids.tolist() for batch in first] == [batch.ids.tolist() for batch in again]
    assert [batch.ids.tolist() for batch in first] != [batch.ids.tolist() for batch in other]
    assert sum(len(batch.skills) for batch in first) == RECIPE.pool
    assert all(batch.ids.numel() <= RECIPE.tokens_per_step or len(batch.ids) == 1 for batch in first)


def test_the_curriculum_bounds_what_is_asked(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def drawn(rng: object, *, size: int) -> object:
        sizes.append(size)
        return recall.draw(rng, size=size)  # type: ignore[arg-type]

    monkeypatch.setattr(feeding, "SHARES", ({"recall": 1.0},))
    monkeypatch.setattr(feeding, "SKILLS", {"recall": drawn})
    copies = [batch for pool in range(4) for batch in feeder(pool, Curriculum(copied=5, pairs=3))]
    assert {skill for batch in copies for skill in batch.skills} == {COPY} and not sizes
    for pool in range(4):
        feeder(pool, LATER)
    assert set(sizes) == {2, 3}  # stories have half as many pairs at least
    assert {int((batch.weights > 0).sum(1).max()) for batch in copies} == {4}  # of 5 tokens said again, 4 are asked


def test_a_row_says_the_token_behind_it(feeder: Feeder) -> None:
    """Of copied sequences: what a row should say stands half a document before it as well."""
    for batch in [*feeder(0, Curriculum(copied=6, pairs=1)), *feeder(0, LATER)]:
        for i, skill in enumerate(batch.skills):
            length = int((batch.ids[i] != PAD).sum())
            rows = batch.rows[i][batch.weights[i] > 0]
            said = batch.ids[i][rows + 1]
            assert int(rows[-1]) == length - 2
            if skill == COPY:
                assert said.tolist() == batch.ids[i][rows + 1 - length // 2].tolist()
            for first, count in batch.answers[i]:
                answer = batch.rows[i, first : first + count]
                assert skill == COPY or int(batch.ids[i][answer[-1] + 1]) == CONFIG["eos_token_id"]
                assert answer.tolist() == list(range(int(answer[0]), int(answer[0]) + count))
                assert float(batch.weights[i, first : first + count].sum()) == pytest.approx(count**0.5)
                assert not batch.weights[i, first + count : first + count + NUM_DRAFTS].any()
            assert sum(count for _, count in batch.answers[i]) == len(rows)


def test_every_answer_of_a_chat_is_rendered_as_it_was_served(text: TextProcessor) -> None:
    """Each turn's prompt is what a client that sends the chat so far would be answered to."""
    made = next(e for i in range(99) if len((e := recall.draw(random.Random(i), size=6)).messages) >= 5)
    rendered = Renderer(text)(made)
    assert text.template is not None and len(rendered.answers) == (len(made.messages) + 1) // 2
    for turn, (place, count) in enumerate(rendered.answers):
        prompt = text.template.render(made.messages[: 2 * turn + 1], [], {"enable_thinking": False})
        assert list(rendered.ids[:place]) == text.encode(prompt, adds_special=False)
        answers = [*(m["content"] for m in made.messages if m["role"] == "assistant"), made.answer.content]
        assert text.raw(rendered.ids[place : place + count]) == f"{answers[turn]}</longcat_s>"
    alone = Renderer(text)(replace(made, teaches_every_turn=False))
    assert (alone.ids, alone.answers) == (rendered.ids, rendered.answers[-1:])


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(feeder: Feeder, tmp_path: Path) -> None:
    whole = training_of(feeder)
    for _ in range(5):
        whole.advance()
    first = training_of(feeder)
    for _ in range(3):
        first.advance()
    first.keep(tmp_path)
    second = training_of(feeder)
    second.resume_if_kept(tmp_path)
    assert (second.step, second.pace) == (first.step, first.pace)
    assert second.pace.taken > 0, "it was interrupted within a pool"
    for _ in range(2):
        second.advance()
    truth = whole.twin.tensors()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in second.twin.tensors().items())


def test_another_recipe_is_refused(feeder: Feeder, tmp_path: Path) -> None:
    training_of(feeder).keep(tmp_path)
    with pytest.raises(ConfigError, match=r"another recipe: steps=8, not 9$"):
        training_of(feeder, replace(RECIPE, steps=9)).resume_if_kept(tmp_path)


def test_a_piece_with_a_space_begins_almost_as_the_one_without() -> None:
    torch.manual_seed(0)
    twin = Twin(ModelConfig.from_dict(CONFIG), longest=8, alike={100: 30, 101: 31})
    for words in (twin.head.weight, twin.draft.word, twin.embedding.word):
        near = torch.cosine_similarity(
            words[[100, 101]] - words[[100, 101]].mean(0), words[[30, 31]] - words[[30, 31]].mean(0)
        )
        assert near.min() > 0.6, "and one difference is common to them"
    assert torch.cosine_similarity(twin.head.weight[102], twin.head.weight[32], dim=0).abs() < 0.4


def test_the_command_gives_the_same_files_twice(tmp_path: Path) -> None:
    """In processes of their own, whose hashes of text differ: weights, tokenizer, and the int8 twin."""
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        status, told = trained(out)
        assert status == 0 and "3/3 loss" in told, told
    assert {name for name in made(first) if name.endswith(".safetensors")} == {
        f"{kind}/model-00001-of-00001.safetensors" for kind in ("bf16", "int8")
    }
    assert made(first) == made(second)
    shutil.rmtree(second / "int8")  # as one that ended while it wrote
    assert trained(second) == (0, "") and made(first) == made(second)
    assert trained(second) == (0, "") and made(first) == made(second), "where all is done nothing is done"
    status, told = trained(second, "--seed", "1")
    assert status == 2 and told.startswith("error: ") and told.endswith("another recipe: seed=0, not 1\n"), told
    shutil.rmtree(second / "state")
    status, told = trained(second)
    assert (status, told) == (
        2,
        f"error: {second / 'bf16'} exists already, and {second / 'state'} holds no training that it could be of\n",
    )


def test_two_trainings_do_not_write_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert trained(tmp_path) == (2, f"error: {tmp_path / 'state'}: another training is at work there\n")
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["lock"]


def test_what_cannot_be_done_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, told = trained(tmp_path / "file")
    assert status == 2 and told.startswith("error: ") and told.count("\n") == 1, told
    status, told = trained(tmp_path, "--threads", "0")
    assert status == 2 and told.endswith("error: argument --threads: 0: must be at least 1\n"), told


def trained(out: Path, *options: str) -> tuple[int, str]:
    """Exit status and standard error of the command, for three steps."""
    command = [sys.executable, "-m", "tools.train_tiny", str(out), "--steps", "3", *options]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=300, stderr=subprocess.PIPE, text=True)
    return ran.returncode, ran.stderr


def made(out: Path) -> dict[str, bytes]:
    """All files of both checkpoints."""
    files = [file for kind in ("bf16", "int8") for file in sorted((out / kind).iterdir())]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_nothing_is_resumed_where_nothing_was_kept(feeder: Feeder, tmp_path: Path) -> None:
    training = training_of(feeder)
    training.resume_if_kept(tmp_path)
    assert training.step == 0


def test_steps_lower_the_losses_in_both_phases(feeder: Feeder) -> None:
    training = training_of(feeder, replace(RECIPE, steps=24, index_from=0, sparse_from=12, learning_rate=5e-3))
    seen = [training.advance() for _ in range(24)]
    early, late = seen[:6], seen[-6:]
    for name in ("next", "drafts"):
        assert sum(vars(one)[name] for one in late) < 0.95 * sum(vars(one)[name] for one in early), name
    assert training.is_sparse


def test_stories_grow_only_while_recall_holds() -> None:
    pace = Pace(curriculum=Curriculum(copied=4, pairs=1))
    for _ in range(200):
        pace.follow(Seen(right={"recall": 8.0}, asked={"recall": 10.0}), RECIPE)
    assert pace.curriculum == Curriculum(copied=4, pairs=1)
    for _ in range(40):
        pace.follow(Seen(right={"recall": 10.0, COPY: 10.0}, asked={"recall": 10.0, COPY: 10.0}), RECIPE)
    assert pace.curriculum.pairs > 1 and pace.curriculum.copied > 4
    for _ in range(2000):
        pace.follow(Seen(right={"recall": 10.0, COPY: 10.0}, asked={"recall": 10.0, COPY: 10.0}), RECIPE)
    assert pace.curriculum == Curriculum(copied=RECIPE.last_copy, pairs=RECIPE.last_pairs)


def test_the_rate_rises_and_falls() -> None:
    training = Training(
        Twin(ModelConfig.from_dict(SMALL), longest=8), replace(RECIPE, steps=140, second_from=60, third_from=100), None
    )  # type: ignore[arg-type]
    rates = list[float]()
    for training.step in range(140):
        rates.append(training.rate())
    assert rates[0] == pytest.approx(RECIPE.learning_rate / 2, rel=1e-2)
    assert max(rates) <= RECIPE.learning_rate
    assert max(rates[59], rates[99], rates[139]) < 0.03 * RECIPE.learning_rate
    assert max(rates[60:]) == pytest.approx(RECIPE.second_rate * RECIPE.learning_rate, rel=0.01)
    assert max(rates[100:]) == pytest.approx(RECIPE.third_rate * RECIPE.learning_rate, rel=0.01)


def test_the_diet_changes_three_times(text: TextProcessor) -> None:
    recipe = replace(RECIPE, late_from=1, second_from=2, third_from=3, steps=4, pool=1)
    training = training_of(Feeder(recipe, Renderer(text), vocab_size=CONFIG["vocab_size"], longest=LONGEST), recipe)
    diets = list[int]()
    for _ in range(4):
        training.advance()
        diets.append(training.pace.drawn_for.diet)
    assert diets == [0, 1, 2, 3]
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in SHARES)


def test_the_folders_are_checkpoints(text: TextProcessor, tmp_path: Path) -> None:
    twin = Twin(ModelConfig.from_dict(CONFIG), longest=8)
    export.text_files(tmp_path / "text", seed=0)
    export.checkpoints(tmp_path, twin, text=tmp_path / "text")
    config = ModelConfig.load(tmp_path / "bf16")
    names = (expected_tensors(config) | draft_tensors(config)).keys()
    assert open_checkpoint(tmp_path / "bf16").shard_of.keys() == names
    assert ModelConfig.load(tmp_path / "int8").quantization is not None
    assert TextProcessor.load(str(tmp_path / "int8")).has_tokenizer
    total = sum(path.stat().st_size for path in (*(tmp_path / "bf16").iterdir(), *(tmp_path / "int8").iterdir()))
    assert total < 12_000_000
