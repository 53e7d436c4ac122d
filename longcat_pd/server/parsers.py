"""Which parsers read the answers of a checkpoint, by name or by what its chat template writes."""

from __future__ import annotations

from collections.abc import Sequence

from longcat_pd.config.schema import ModelSection
from longcat_pd.server.choice import ChoiceText
from longcat_pd.server.markup import CALL_OPEN, KEY_OPEN, THINK_OPEN
from longcat_pd.server.openai import Body, ChatBody
from longcat_pd.server.reasoning import ReasoningSplitter
from longcat_pd.server.stops import StopFinder
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.tool_calls import Style, ToolCallParser

_PROMPT_END = 64  # tokens; more than the opening tag and white space take, also where they are spelt in bytes


class Parsers:
    """Makes the reader of each choice."""

    def __init__(self, model: ModelSection, text: TextProcessor) -> None:
        self._text = text
        source = "" if text.template is None else text.template.source
        reasoning = model.reasoning_parser
        self.reads_reasoning = THINK_OPEN in source if reasoning == "auto" else reasoning == "longcat"
        self.style = _style(model, source)

    def prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        """The last of a prompt's text, from which it is seen whether a block of reasoning is open."""
        return self._text.raw(prompt_token_ids[-_PROMPT_END:])

    def choice(self, body: Body, prompt_token_ids: Sequence[int], index: int) -> ChoiceText:
        """The reader for one choice of a body."""
        decoder = self._text.decoder()
        # a piece of text is that of a token
        stops = StopFinder(body.stop, num_exempt=body.min_tokens, keeps_match=body.include_stop)
        if not isinstance(body, ChatBody):
            return ChoiceText(index, decoder, stops=stops, content_field="text")
        splitter = None
        if self.reads_reasoning:
            splitter = ReasoningSplitter(self.prompt_end(prompt_token_ids), keeps_markup=not body.separate_reasoning)
        tools = None
        if body.tools and self.style is not None:
            tools = ToolCallParser(self.style, body.tools, only_one=not body.parallel_tool_calls)
        field = "reasoning_content" if body.separate_reasoning else "content"
        return ChoiceText(index, decoder, stops=stops, splitter=splitter, tools=tools, reasoning_field=field)


def _style(model: ModelSection, source: str) -> Style | None:
    if model.tool_parser == "none":
        return None
    if model.tool_parser != "auto":
        return model.tool_parser
    if KEY_OPEN in source:
        return "longcat_xml"
    return "longcat" if CALL_OPEN in source else None
