import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from longcat_pd.errors import ConfigError, InvalidRequest
from longcat_pd.server.sampling_defaults import SamplingDefaults
from longcat_pd.server.text import ChatTemplate, TextProcessor
from tests.unit.fake_service import write_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return TextProcessor.load(write_folder(tmp_path_factory.mktemp("model")))


def ids_of(text, *tokens):
    return [text.need_tokenizer("x").token_to_id(token) for token in tokens]


def test_any_text_survives_and_every_prefix_is_whole_characters(text):
    sample = "naïve 你好 👩‍👩‍👧 \u2028 end\x00"
    ids = text.encode(sample)
    decoder = text.decoder()
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) == sample and "�" not in "".join(pieces)
    for end in range(len(ids) + 1):
        decoder = text.decoder()
        assert sample.startswith("".join(decoder.push(i) for i in ids[:end]))


def test_bytes_that_never_become_a_character_are_left_out(text):
    first, *rest = text.encode("龘")
    assert rest, "needs a character of several tokens"
    decoder = text.decoder()
    assert [decoder.push(i) for i in (first, *text.encode("a"), first)] == ["", "a", ""]


def test_a_replacement_character_of_the_model_is_kept(text):
    decoder = text.decoder()
    assert "".join(decoder.push(i) for i in text.encode("a\ufffdb")) == "a\ufffdb"


def test_special_tokens_are_silent_and_markers_are_text(text):
    silent = ids_of(text, "<longcat_s>", "</longcat_s>", "<longcat_pad>", "<longcat_user>", "<longcat_assistant>")
    markers = ids_of(text, "<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "<longcat_arg_key>")
    decoder = text.decoder()
    assert "".join(decoder.push(i) for i in silent) == ""
    shown = "".join(decoder.push(i) for i in markers)
    assert shown == "<longcat_think></longcat_think><longcat_tool_call><longcat_arg_key>"
    assert text.raw(silent[:2]) == "<longcat_s></longcat_s>"


def test_how_log_probs_show_tokens(text):
    first, *_ = text.encode("龘")
    shown, data = text.token_text(first)
    assert shown == "bytes:" + "".join(f"\\x{b:02x}" for b in data)
    assert text.token_text(ids_of(text, "</longcat_s>")[0]) == ("</longcat_s>", b"</longcat_s>")
    assert text.token_text(text.encode("a")[0]) == ("a", b"a")


def test_chat_is_rendered_by_the_stored_template(text):
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})
    assert text.raw(text.encode_chat(messages, (), {})).endswith(
        "Q /think_off <longcat_assistant><longcat_think>\n\n</longcat_think>\n"
    )
    thinking = text.raw(text.encode_chat(messages, (), {"enable_thinking": True}))
    assert thinking == "<longcat_system>S<longcat_user>Q /think_on <longcat_assistant><longcat_think>\n"
    tool = {"type": "function", "function": {"name": "f", "description": "说 <b>"}}
    assert '{"name": "f", "description": "说 <b>"}' in text.raw(text.encode_chat(messages, (tool,), {}))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_raises_is_the_clients_error(source):
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(({"role": "user", "content": "x"},), (), {})
    assert caught.value.param == "messages"


def test_switches_cannot_replace_what_is_ours():
    template = ChatTemplate(
        "{{ messages[0].content }}{{ bos_token }}{{ x }}{{ strftime_now('%Y')|length }}", {"bos_token": "<s>"}
    )
    assert template.render(({"content": "a"},), (), {"messages": [], "bos_token": "!", "x": 1}) == "a<s>14"


def test_templates_are_found(tmp_path):
    folder = write_folder(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert TextProcessor.load(folder).template is None
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    for given in ("from config", [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "from config"}]):
        (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": given}))
        assert TextProcessor.load(folder).template.source == "from config"
    (tmp_path / "m" / "chat_template.jinja").write_text("from file")
    assert TextProcessor.load(folder).template.source == "from file"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"null"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_damaged_file_is_refused_by_its_own_name(tmp_path, name, content):
    folder = write_folder(tmp_path / "m")
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"/{name}"):
        TextProcessor.load(folder)


@pytest.mark.parametrize("given", [[{}], [None], [{"name": []}]])
def test_named_templates_without_a_default_are_none(tmp_path, given):
    folder = write_folder(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert TextProcessor.load(folder).template is None


def test_a_checkpoint_without_tokenizer_refuses_text(tmp_path):
    text = TextProcessor.load(write_folder(tmp_path / "m", has_tokenizer=False))
    assert not text.has_tokenizer and text.vocab_size == 1024
    for refused in (lambda: text.encode("a"), lambda: text.encode_chat((), (), {})):
        with pytest.raises(InvalidRequest) as caught:
            refused()
        assert caught.value.code == "tokenizer_missing"
    assert text.decoder().push(5) == "" and text.token_text(5) == ("token_id:5", None)


def test_ids_outside_the_vocabulary_are_named(text):
    text.check_ids([0, 1023], "prompt")
    for bad in (1024, -1):
        with pytest.raises(InvalidRequest) as caught:
            text.check_ids([0, bad], "prompt")
        assert caught.value.param == "prompt[1]" and "1023" in caught.value.message


def small_tokenizer(post_processor=None):
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2, "b": 3}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=post_processor, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return tokenizer


@pytest.mark.parametrize(
    "post_processor,config,ids",
    [
        (None, {}, [2, 3]),
        ("<s> $A", {}, [0, 2, 3]),
        ("<s> $A </s>", {}, [0, 2, 3]),
        ("$A </s>", {}, [2, 3]),
        ("<s> $A", {"add_bos_token": False}, [2, 3]),
        ("$A </s>", {"add_bos_token": True, "add_eos_token": True, "bos_token": {"content": "<s>"}}, [0, 2, 3]),
    ],
)
def test_a_prompt_gets_the_bos_rule_and_never_an_eos(post_processor, config, ids):
    text = TextProcessor(4, small_tokenizer(post_processor), tokenizer_config=config)
    assert text.encode("ab") == ids
    assert text.encode("ab", adds_special=False) == [2, 3]


def test_tokens_with_spelt_bytes_and_space_marks():
    tokenizer = Tokenizer(
        models.BPE(vocab={"\u2581a": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    decoder = TextProcessor(4, tokenizer).decoder()
    assert [decoder.push(i) for i in (0, 1, 2, 3)] == [" a", "", "", "你"]


def test_sampling_defaults(tmp_path):
    assert SamplingDefaults.load(write_folder(tmp_path / "a")).shown() == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    folder = write_folder(tmp_path / "b", temperature=0.7, top_p=0.95, top_k=20, eos_token_id=2)
    assert SamplingDefaults.load(folder).shown() == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
