"""AnswerText against its definition: however tokens are cut into deltas, text, tokens and stops are the
same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.answer import Answer, AnswerText, prompt_offsets, prompt_text
from kvasir.engine.reading import Reading
from kvasir.errors import InvalidRequest
from kvasir.parse.events import Reasoning
from kvasir.parse.table import choose
from kvasir.types import Delta, FinishReason, SamplingParams, TokenLogprob, Usage
from tests.examples import examples
from tests.serve.fakes import BOS, EOS, VOCAB, byte_tokenizer

TOKENIZER = byte_tokenizer()
# Few letters, so that stop strings occur; halves of characters; special tokens.
TOKENS = st.lists(st.sampled_from([*b"abc", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, BOS]), max_size=30)
STOPS = st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3).map(tuple)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 2, ((5, -0.5), (token, -1.0)))


def run(ids: list[int], params: SamplingParams, cuts: list[int], reason=FinishReason.LENGTH, stop_token=None):
    """The answer that these ids become when they come in pieces of the given sizes."""
    text, answer = AnswerText(TOKENIZER, (), params), Answer()
    rest = list(ids)
    sizes = [*cuts, len(ids)]
    while not text.done:
        size = max(1, sizes.pop(0))
        piece, rest = rest[:size], rest[size:]
        last = not rest
        delta = Delta(
            "r",
            token_ids=tuple(piece),
            logprobs=tuple(map(logprob, piece)),
            finish_reason=reason if last else None,
            stop_token=stop_token if last else None,
        )
        answer.add(text.push(delta))
        sizes = sizes or [len(ids)]
    return answer


def by_definition(ids: list[int], stops: tuple[str, ...]) -> tuple[str, int, str | None]:
    """(text, number of tokens, stop string): the shortest run of tokens whose text has a stop string in
    it."""
    for count in range(len(ids) + 1):
        data = b"".join(b"" if i in TOKENIZER.special_ids else TOKENIZER.token_bytes(i) for i in ids[:count])
        text = data.decode(errors="replace")
        if count < len(ids):  # half a character at the end is not text yet
            text = text if data.decode(errors="ignore") == text else text.rstrip("\ufffd")
        ends = {end: None for s in stops for end in [text.find(s) + len(s)] if s in text}
        if ends:
            end = min(ends)
            match = max((s for s in stops if text[:end].endswith(s)), key=len)
            return text[: end - len(match)], count, match
    return text, len(ids), None


@examples(300)
@given(TOKENS.filter(bool), STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_any_cut_into_deltas_gives_the_answer_of_the_definition(ids, stops, cuts):
    ids = [i for i in ids if i < 0x80 or i == BOS] or [97]
    answer = run(ids, SamplingParams(stop=stops, logprobs=2), cuts)
    text, count, matched = by_definition(ids, stops)
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids[:count], matched)
    assert answer.finish_reason is (FinishReason.LENGTH if matched is None else FinishReason.STOP)
    assert [info.token for info in answer.logprobs] == answer.token_ids
    assert answer.usage == Usage(0, count, 0)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8), STOPS)
def test_drafts_are_counted_as_far_as_the_answer_goes(steps, stops):
    """steps: of each delta the tokens, those of them that were drafted, and drafted ones that were wrong."""
    text, answer, drafted, marks = AnswerText(TOKENIZER, (), SamplingParams(stop=stops, logprobs=0)), Answer(), 0, []
    for i, (size, right, wrong) in enumerate(steps):
        right, ids = min(right, size - 1), tuple(b"abc"[j % 3] for j in range(size))
        last = FinishReason.LENGTH if i == len(steps) - 1 else None
        logprobs = tuple(map(logprob, ids))
        delta = Delta("r", 0, ids, logprobs, finish_reason=last, drafted=right + wrong, accepted=right)
        answer.add(found := text.push(delta))
        drafted += right + wrong
        marks += [j < right for j in range(len(found.token_ids))]
        assert found.accepted == sum(info.drafted for info in found.logprobs)
        if text.done:
            break
    usage = answer.usage
    assert usage.accepted_tokens + usage.rejected_tokens == drafted
    assert usage.accepted_tokens <= usage.completion_tokens == len(answer.token_ids)
    assert [info.drafted for info in answer.logprobs] == marks and sum(marks) == usage.accepted_tokens


@examples(300)
@given(TOKENS.filter(bool), STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_the_cut_does_not_matter_with_broken_characters_either(ids, stops, cuts):
    params = SamplingParams(stop=stops, logprobs=0)
    answers = [run(ids, params, c) for c in (cuts, [1] * len(ids), [])]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].text == answers[1].text == answers[2].text
    if not stops:
        assert run(ids, params, cuts).text == TOKENIZER.decode(ids)


@given(TOKENS.filter(bool))
def test_offsets_say_where_each_tokens_text_begins(ids):
    answer = run(ids, SamplingParams(logprobs=0, skip_special_tokens=False), [])
    for info, following in zip(answer.logprobs, [*answer.logprobs[1:], None], strict=True):
        end = following.offset if following else len(answer.text)
        if info.token < 0x80:
            assert answer.text[info.offset : end].endswith(info.text)
        assert 0 <= info.offset <= end <= len(answer.text)


def test_the_end_id_counts_as_a_token_and_leaves_no_text():
    ids = [*b"ab", EOS]
    answer = run(ids, SamplingParams(skip_special_tokens=False), [], FinishReason.STOP, stop_token=EOS)
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("ab", ids, None)
    shown = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert run(ids, shown, [], FinishReason.STOP, stop_token=EOS).text == "ab<eos>"


def test_an_asked_for_stop_id_is_the_stop_reason():
    params = SamplingParams(stop_token_ids=(98,))
    answer = run([97, 98], params, [], FinishReason.STOP, stop_token=98)
    assert (answer.text, answer.stop_reason) == ("a", 98)


def test_a_length_stop_in_the_middle_of_a_letter_is_no_end_id():
    assert run([98], SamplingParams(stop_token_ids=(99,)), []).text == "b"


def test_stop_strings_wait_for_min_tokens():
    ids = list(b"abab")
    assert run(ids, SamplingParams(stop=("b",)), []).text == "a"
    answer = run(ids, SamplingParams(stop=("b",), min_tokens=2), [])
    assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("aba", "b", 4)


def test_held_back_text_is_released_at_the_end():
    answer = run([*b"stab", 0xE2, 0x82], SamplingParams(stop=("able",)), [])
    assert (answer.text, answer.finish_reason) == ("stab\ufffd", FinishReason.LENGTH)


def test_a_delta_shows_no_text_that_may_begin_a_stop_string():
    text = AnswerText(TOKENIZER, (), SamplingParams(stop=("END",)))
    shown = [text.push(Delta("r", token_ids=(token,))).text for token in b"xENxEND"]
    assert shown == ["x", "", "", "ENx", "", "", ""]
    assert text.done


def test_an_answer_completes_the_last_character_of_the_prompt():
    text = AnswerText(TOKENIZER, (97, 0xC3), SamplingParams())
    delta = text.push(Delta("r", token_ids=(0xA9,), finish_reason=FinishReason.LENGTH, cached_tokens=1))
    assert prompt_text(TOKENIZER, (97, 0xC3)) + delta.text == "aé"
    assert delta.usage == Usage(2, 1, 1)


def test_prompt_scores_carry_their_places():
    ids = (97, 0xC3, 0xA9, 98)
    text = AnswerText(TOKENIZER, ids, SamplingParams(prompt_logprobs=1))
    entries = (None, *map(logprob, ids[1:]))
    infos = text.push(Delta("r", token_ids=(99,), prompt_logprobs=entries)).prompt_logprobs
    assert [i.offset for i in infos] == prompt_offsets(TOKENIZER, ids, True) == [0, 1, 1, 2]
    assert [i.logprob for i in infos] == [None, -1.0, -1.0, -1.0]
    assert infos[3].text == "b" and infos[3].top[0].token == 5


def test_ids_outside_the_vocabulary_of_the_text_are_no_error():
    assert run([97, VOCAB + 5], SamplingParams(logprobs=0), []).text == "a"


def test_answers_without_a_tokenizer_are_ids():
    text = AnswerText(None, (1,), SamplingParams(logprobs=0))
    delta = text.push(Delta("r", token_ids=(5,), logprobs=(logprob(5),), finish_reason=FinishReason.LENGTH))
    assert (delta.text, delta.token_ids, delta.logprobs[0].text) == ("", (5,), "")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        AnswerText(None, (1,), SamplingParams(stop=("x",)))


THOUGHT = "<think>\nAa<b\n</think>\n\nCc <d> e<think>"


@given(st.lists(st.integers(1, 5), max_size=40), st.sampled_from([(), ("e<",), ("b\n",)]), st.integers(1, len(THOUGHT)))
def test_a_token_belongs_to_the_same_kind_of_event_however_the_answer_is_cut(cuts, stops, size):
    format = choose(reasoning="think")
    params = SamplingParams(stop=stops)

    def kinds(cuts: list[int]) -> tuple[list[type], Usage]:
        text = AnswerText(TOKENIZER, (), params, Reading(format, None, False, True, frozenset()))
        ids, found, usage, sizes = list(THOUGHT.encode()[:size]), [], Usage(), list(cuts)
        while ids and not text.done:
            count = sizes.pop(0) if sizes else 1
            piece, ids = ids[:count], ids[count:]
            delta = text.push(Delta("r", 0, tuple(piece), finish_reason=None if ids else FinishReason.LENGTH))
            for event, settled in zip(delta.events, delta.settled, strict=True):
                found += [type(event)] * (settled - len(found))
            usage = delta.usage
        assert len(found) <= usage.completion_tokens
        return found, usage

    found, usage = kinds(cuts)
    assert (found, usage) == kinds([])
    assert usage.reasoning_tokens == found.count(Reasoning)
