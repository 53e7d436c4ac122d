"""From text to token ids and back, for one checkpoint.

Owns the tokenizer and the chat template: rendering and encoding prompts, the bytes of tokens, decoding as tokens come.
Knows neither requests nor stop strings. A checkpoint without a tokenizer has a TextProcessor too; it serves token ids and
refuses text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError, InvalidRequest
from longcat_pd.server.markup import MARKERS, ROLE_TOKENS

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_SPACE_MARK = "\u2581"


class TextProcessor:
    """Text of one checkpoint. Pure: may be used from several threads.

    Args:
        vocab_size: the model's; ids outside it are refused.
        tokenizer: None if the checkpoint has none.
        tokenizer_config: ``tokenizer_config.json``.
        template: None if there is none; chat is refused then.
    """

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        *,
        tokenizer_config: Mapping[str, Any] | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.template = template
        self._tokenizer = tokenizer
        if tokenizer is None:
            return
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = tokenizer_config or {}
        self._bytes = TokenBytes(tokenizer)
        self._silent = _silent_ids(tokenizer, config)
        self._prefix = _prefix_ids(tokenizer, config)

    @classmethod
    def load(cls, folder: str) -> TextProcessor:
        """From a checkpoint's folder. Raises ConfigError when a file is there and cannot be read."""
        vocab_size = ModelConfig.load(folder).vocab_size
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            return cls(vocab_size)
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        config = _tokenizer_config(path.with_name("tokenizer_config.json"))
        return cls(vocab_size, tokenizer, tokenizer_config=config, template=ChatTemplate.load(folder, config))

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be read and written."""
        return self._tokenizer is not None

    @property
    def marker_ids(self) -> dict[str, int]:
        """The markers that are tokens of their own, which no ordinary tokens spell."""
        if self._tokenizer is None:
            return {}
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in tokens.items() if token.content in MARKERS}

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer, or InvalidRequest tokenizer_missing that names the field which needs it."""
        if self._tokenizer is None:
            raise InvalidRequest(
                f"{param} needs a tokenizer and the checkpoint has none; send token ids and set return_token_ids",
                code="tokenizer_missing",
                param=param,
            )
        return self._tokenizer

    def encode(self, text: str, *, param: str = "prompt", adds_special: bool = True) -> list[int]:
        """Ids of a text, with the tokenizer's rule for what stands at a beginning, and never with an EOS behind it."""
        ids: list[int] = self.need_tokenizer(param).encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids] if adds_special else ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ) -> list[int]:
        """Ids of a rendered conversation; the template alone says what stands at its beginning."""
        self.need_tokenizer("messages")
        if self.template is None:
            raise InvalidRequest("the checkpoint has no chat template", code="tokenizer_missing", param="messages")
        return self.encode(self.template.render(messages, tools, switches), param="messages", adds_special=False)

    def check_ids(self, ids: Iterable[int], path: str) -> None:
        """Raise InvalidRequest for the first id outside the vocabulary."""
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                where = f"{path}[{place}]"
                raise InvalidRequest(f"{where} = {token_id} is outside 0 ... {self.vocab_size - 1}", param=where)

    def raw(self, ids: Iterable[int]) -> str:
        """The text of ids with every special token in it; bytes that are no text are left out."""
        if self._tokenizer is None:
            return ""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="ignore")

    def token_text(self, token_id: int) -> tuple[str, bytes | None]:
        """How log-probs show a token: its text, or ``bytes:\\x..`` if its bytes are no text by themselves; its bytes."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", None
        data = self._bytes[token_id]
        try:
            return data.decode("utf-8"), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def decoder(self) -> TextDecoder:
        """A decoder for one answer."""
        return TextDecoder(self)

    def answer_bytes(self, token_id: int) -> bytes:
        """What a generated token adds to the raw text: nothing for BOS, EOS, padding and roles."""
        if self._tokenizer is None or token_id in self._silent:
            return b""
        return self._bytes[token_id]


class TextDecoder:
    """Raw text of one answer, token by token; always whole characters. Bytes that never become one are left out."""

    def __init__(self, text: TextProcessor) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    @property
    def has_text(self) -> bool:
        """Whether any token completes a character."""
        return self._text.has_tokenizer

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._utf8.decode(self._text.answer_bytes(token_id))


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, special ones included; filled as they are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._bytes_of = _byte_alphabet() if _is_byte_level(tokenizer) else {}

    def __missing__(self, token_id: int) -> bytes:
        """An id that the tokenizer does not know (padding of the vocabulary) has no bytes."""
        data = self[token_id] = self._added[token_id] if token_id in self._added else self._read(token_id)
        return data

    def _read(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of:
            return b"".join(self._bytes_of.get(character, character.encode()) for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE_MARK, " ").encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    parts: list[Any] = [json.loads(tokenizer.to_str()).get(part) for part in ("decoder", "pre_tokenizer")]
    return any('"ByteLevel"' in json.dumps(part) for part in parts)


def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as a printable character: itself if it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


def _silent_ids(tokenizer: Tokenizer, config: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that never become text. The markers of reasoning and tool calls do, also where they are special."""
    named = {special_token(config, name) for name in _SPECIAL_NAMES} | set(ROLE_TOKENS)
    return frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if (token.special or token.content in named) and token.content not in MARKERS
    )


def _prefix_ids(tokenizer: Tokenizer, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What the tokenizer puts before a text: by ``add_bos_token`` if it is said, else by its own post-processing."""
    wants_bos = config.get("add_bos_token")
    bos = special_token(config, "bos_token")
    bos_id: int | None = tokenizer.token_to_id(bos) if bos is not None else None
    if wants_bos is False:
        return ()
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    dressed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    before = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
    if wants_bos and not before and bos_id is not None:
        return (bos_id,)
    return tuple(dressed[:before])


class ChatTemplate:
    """The template stored next to a checkpoint, and the special tokens that it may print.

    It comes from outside and is run in a sandbox; what it raises over a conversation is the client's error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not parse: {error}", param="model.path") from None
        self._special_tokens = dict(special_tokens)
        self.source = source

    @classmethod
    def load(cls, folder: str, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """``chat_template.jinja``, else the one in ``tokenizer_config.json``, else None."""
        path = Path(folder) / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.exists() else tokenizer_config.get("chat_template")
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if isinstance(source, list):  # several named ones
            named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        tokens = {name: special_token(tokenizer_config, name) for name in _SPECIAL_NAMES}
        return cls(source, {name: token for name, token in tokens.items() if token is not None})

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ) -> str:
        """The prompt, up to where the assistant begins. Raises InvalidRequest for what the template does not accept."""
        values = {
            **switches,
            **self._special_tokens,
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(values)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as e:
            raise InvalidRequest(f"the chat template does not accept this conversation: {e}", param="messages") from None


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """What the file says, nothing if there is none. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object", param="model.path")
    return config


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}", param="model.path")


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token, which is given as such or as a record."""
    token = tokenizer_config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
