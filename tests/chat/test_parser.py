# SPDX-License-Identifier: Apache-2.0
"""The server's parser driven directly: every case of answers.py, however the answer is cut into pieces.

Cut by characters there are no token ids. Cut by tokens the pieces are those of the server's detokeniser, with
characters held back as it does while a stop string may be coming.
"""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.detokenizer_utils import convert_prompt_ids_to_tokens, detokenize_incrementally

from .answers import CASES, Case
from .driver import MODES, USER, Answer, assert_same
from .test_answers import spelt

DIRECT = [case for case in CASES if not case.needs_server]
THINK, END_THINK, ASSISTANT, EOS = 128821, 128822, 128804, 1


class Direct:
    """The parser of one version for one case."""

    def __init__(self, tokenizer, version: str, case: Case):
        self.answer, self.expected, fields = spelt(version, case)
        if fields.get("parallel_tool_calls") is False:
            self.expected = None  # the serving layer keeps the first call alone
        self.request = ChatCompletionRequest.model_validate({"model": "m", "messages": [USER], **fields})
        self.tokenizer, self._kwargs = tokenizer, fields.get("chat_template_kwargs", {})
        self._prompt = [ASSISTANT, THINK if case.thinks else END_THINK]
        self._class = ParserManager.get_parser(MODES[version], MODES[version], True)

    def _parser(self):
        return self._class(self.tokenizer, self.request.tools, chat_template_kwargs=self._kwargs)

    def whole(self, ids=()) -> Answer:
        parser = self._parser()
        parser.set_prompt_token_ids(self._prompt)
        reasoning, content, calls = parser.parse(self.answer, self.request, True, ids)
        return Answer(reasoning or "", content or "", [(call.name, call.arguments) for call in calls or ()])

    def streamed(self, pieces) -> Answer:
        parser, answer = self._parser(), Answer()
        for number, (text, ids) in enumerate(pieces):
            prompt = None if number else self._prompt
            delta = parser.parse_delta(text, list(ids), self.request, prompt, finished=number == len(pieces) - 1)
            if delta is not None:
                answer.add(delta.model_dump(exclude_unset=True))
        return answer

    def token_pieces(self, tokens_a_step: int, held_back: int) -> list[tuple[str, list[int]]]:
        """What the server feeds its parser, with `held_back` characters kept back until the end."""
        ids = self.tokenizer.encode(self.answer, add_special_tokens=False) + [EOS]
        tokens, prefix, read = convert_prompt_ids_to_tokens(self.tokenizer, self._prompt)
        all_ids, pieces, text, sent = list(self._prompt), [], "", 0
        for at in range(0, len(ids), tokens_a_step):
            step = ids[at : at + tokens_a_step]
            for token in step:
                all_ids.append(token)
                fresh, new, prefix, read = detokenize_incrementally(
                    self.tokenizer,
                    all_ids,
                    tokens,
                    prefix,
                    read,
                    skip_special_tokens=False,
                    spaces_between_special_tokens=True,
                )
                tokens = tokens + fresh
                text += "" if token == EOS else new
            end = len(text) if at + tokens_a_step >= len(ids) else max(sent, len(text) - held_back)
            pieces.append((text[sent:end], step))
            sent = end
        return pieces


@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case.id)
def test_every_cut_gives_the_whole_answer(tokenizers, version, case):
    direct = Direct(tokenizers[version], version, case)
    whole = direct.whole()
    if direct.expected is not None:
        assert (whole.reasoning, whole.content, whole.calls) == (
            direct.expected.reasoning,
            direct.expected.content,
            direct.expected.calls,
        )
    text = direct.answer
    assert_same(whole, direct.streamed([(character, ()) for character in text]))
    for cut in range(len(text)):
        assert_same(whole, direct.streamed([(text[:cut], ()), (text[cut:], ())]))


@pytest.mark.parametrize("held_back", (0, 1, 5, 30))
@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case.id)
def test_held_back_text_changes_nothing(tokenizers, version, case, held_back):
    direct = Direct(tokenizers[version], version, case)
    whole = direct.whole(direct.tokenizer.encode(direct.answer, add_special_tokens=False) + [EOS])
    for tokens_a_step in (1, 6):
        assert_same(whole, direct.streamed(direct.token_pieces(tokens_a_step, held_back)))
