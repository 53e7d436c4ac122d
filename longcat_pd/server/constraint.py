"""From a checked body to the grammar that its answer has to obey.

Owns which bodies ask for one, where in the body a refusal of the grammar library points to, and what it says. The text of
a grammar is ``engine/grammar_text.py``, what is enforced of a schema ``schema.py``. Does not know the library: whoever
calls says why a grammar's text cannot be kept, in the library's own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from longcat_pd.config.schema import ModelSection
from longcat_pd.engine.grammar_text import GrammarText, JsonTool, Markup, Reasoning, TaggedTool
from longcat_pd.errors import InvalidRequest
from longcat_pd.server.markup import (
    CALL_CLOSE,
    CALL_OPEN,
    KEY_CLOSE,
    KEY_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    VALUE_CLOSE,
    VALUE_OPEN,
)
from longcat_pd.server.openai import Body, ChatBody
from longcat_pd.server.parsers import Parsers
from longcat_pd.server.schema import Allowance, SchemaReader
from longcat_pd.server.tagged_tools import read_tagged
from longcat_pd.server.text import TextProcessor

MARKUP = Markup((THINK_OPEN, THINK_CLOSE), (CALL_OPEN, CALL_CLOSE), (KEY_OPEN, KEY_CLOSE), (VALUE_OPEN, VALUE_CLOSE))
MAX_TEXT = 256 * 1024
_ANSWER = "response_format.json_schema.schema"
_WORDS = re.compile(r"(?:failed to compile JSON schema: )?([^\n]*)")
_UNENFORCED = (  # in the library's words, and the keyword
    ("oneOf", "oneOf"),
    ("patternProperty", "patternProperties"),
    ("min/maxProperties", "minProperties, maxProperties"),
    ("circular references", "$ref"),
    ("if regex is empty", "pattern"),
    ("multipleOf", "multipleOf"),
    ("multiple of", "multipleOf"),
    ("float range", "minimum, maximum"),
    ("integer range", "minimum, maximum"),
)
_BETTER_WORDS = {"oneOf": "its options do not exclude each other visibly; anyOf lets them overlap"}  # by keyword

Tool = JsonTool | TaggedTool
Check = Callable[[str], str]


class Constraints:
    """Makes the grammars of one checkpoint's answers. Pure: may be used from several threads.

    Args:
        model: says how answers are read.
        text: of the checkpoint.
        check: why a grammar cannot be kept, in the library's words, or empty; called by one thread at a time.
    """

    def __init__(self, model: ModelSection, text: TextProcessor, check: Check) -> None:
        self.parsers = Parsers(model, text)
        self._text = text
        self._check = check
        self._lock = Lock()

    def grammar(self, body: Body, prompt_token_ids: Sequence[int]) -> str:
        """The text; empty if the answer may be anything. Raises InvalidRequest, with the place in the body."""
        if body.answer_schema is not None:
            self._text.need_tokenizer("response_format")
            return self._answer(body.answer_schema, self._reasoning(body, prompt_token_ids))
        if isinstance(body, ChatBody) and body.tool_use.is_forced:
            return self._calls(body, self._reasoning(body, prompt_token_ids))
        return ""

    def _reasoning(self, body: Body, prompt_token_ids: Sequence[int]) -> Reasoning:
        """What of a block of reasoning may come before the answer proper."""
        if not isinstance(body, ChatBody) or not self.parsers.reads_reasoning:
            return "none"
        end = self.parsers.prompt_end(prompt_token_ids).rstrip()
        if end.endswith(THINK_OPEN):
            return "open"
        is_over = end.endswith(THINK_CLOSE) or body.template_kwargs.get("enable_thinking") is False
        return "none" if is_over else "optional"

    def _text_of(self) -> GrammarText:
        return GrammarText(MARKUP, self._text.marker_ids)

    def _answer(self, schema: Mapping[str, Any], reasoning: Reasoning) -> str:
        text = self._text_of()
        whole = text.whole(text.json(SchemaReader(schema, _ANSWER).read(schema, _ANSWER)), reasoning)
        self._checked(whole, _ANSWER)
        return whole

    def _calls(self, body: ChatBody, reasoning: Reasoning) -> str:
        if self.parsers.style is None:
            raise InvalidRequest(
                "the checkpoint has no markup of tool calls, so none can be forced",
                code="unsupported_parameter",
                param="tool_choice",
            )
        named = body.tool_use.named
        places = [i for i, tool in enumerate(body.tools) if named in (None, tool["function"]["name"])]
        allowance = Allowance("tools")
        tools = {_path(i): self._tool(body.tools[i]["function"], _path(i), allowance) for i in places}
        text = self._text_of()
        only_one = named is not None or not body.parallel_tool_calls
        whole = text.whole(text.calls(tools.values(), only_one=only_one), reasoning)
        if len(whole) > MAX_TEXT:
            raise InvalidRequest(f"the tools take more than {MAX_TEXT} characters as a grammar", param="tools")
        if words := self._refusal(whole):
            for path, tool in tools.items():  # which of them it is
                alone = self._text_of()
                self._checked(alone.whole(alone.calls([tool], only_one=True), "none"), path)
            raise _refused(words, "tools")
        return whole

    def _tool(self, function: Mapping[str, Any], path: str, allowance: Allowance) -> Tool:
        name, parameters = function["name"], function.get("parameters")
        if self.parsers.style == "longcat_xml":
            return read_tagged(name, parameters, path, allowance=allowance)
        if parameters is None:
            return JsonTool(name, {"type": "object"})
        schema = SchemaReader(parameters, path, allowance=allowance).read(parameters, path)
        if schema.get("type") == "object":
            return JsonTool(name, schema)
        definitions = schema.pop("$defs", None)
        schema = {"type": "object", "allOf": [schema]}
        return JsonTool(name, schema if definitions is None else {**schema, "$defs": definitions})

    def _checked(self, whole: str, path: str) -> None:
        if words := self._refusal(whole):
            raise _refused(words, path)

    def _refusal(self, whole: str) -> str:
        with self._lock:
            return self._check(whole)


def _path(tool: int) -> str:
    return f"tools[{tool}].function.parameters"


def _refused(words: str, path: str) -> InvalidRequest:
    """The library's refusal as ours: a keyword that it does not enforce here, or a schema that nothing satisfies."""
    place = words.find("failed to compile JSON schema: ")
    match = _WORDS.match(words, max(place, 0))
    said = (match[1] if match else words)[:200]
    if "nsatisfiable" in said or ("is empty:" in said and "Unable to determine" not in said):
        return InvalidRequest(f"{path} cannot be satisfied: {said}", code="invalid_value", param=path)
    for part, keyword in _UNENFORCED:
        if part in said:
            why = _BETTER_WORDS.get(keyword, said)
            return InvalidRequest(
                f"{path}: the keyword {keyword} cannot be enforced here: {why}", code="unsupported_parameter", param=path
            )
    return InvalidRequest(f"{path} cannot be enforced: {said}", code="unsupported_parameter", param=path)
