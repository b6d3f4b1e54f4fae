"""Front over a real scheduler and pool: requests in order, text out, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from kvasir.engine.front import Front
from kvasir.errors import EngineDead, InvalidRequest, QueueFull, TemplateError
from kvasir.text.chat import ChatTemplate
from kvasir.types import FinishReason, SamplingParams, ServiceClass, Target, Task
from tests.serve.fakes import BOS, EOS, POISON, EchoEngine, byte_tokenizer
from tests.serve.running import assert_idle, make_front

GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture
async def front():
    front = make_front()
    await front.start()
    yield front
    await assert_idle(front)
    await front.stop()


async def answer(front: Front, prompt: str, **params):
    ids = await front.encode(prompt)
    (only,) = await front.complete(front.resolve(ids, SamplingParams(**(GREEDY | params))))
    return only


async def test_text_is_streamed_as_the_engine_computes_it(front):
    got = await answer(front, "hej é ", max_tokens=14)
    assert got.text == "hej é hej é "  # 7 bytes, twice
    assert (got.finish_reason, got.usage.prompt_tokens, got.usage.completion_tokens) == ("length", 7, 14)


async def test_a_character_split_over_steps_is_never_shown_in_half(front):
    request = front.resolve(await front.encode("€"), SamplingParams(temperature=0.0, max_tokens=5))
    texts = [delta.text async for delta in front.stream(request)]
    assert texts == ["", "", "€", "", "\ufffd"]


async def test_a_stop_string_ends_the_answer_in_the_engine_too():
    front = make_front(step_seconds=0.01)  # slow enough that the answer is far from its length by then
    await front.start()
    got = await answer(front, "one two three ", stop=("two",), max_tokens=400)
    assert (got.text, got.stop_reason, got.finish_reason) == ("one ", "two", FinishReason.STOP)
    await assert_idle(front)
    stats = await front.stats()
    assert stats.generated_tokens < 400 and stats.aborted == 1
    await front.stop()


async def test_one_answers_stop_leaves_the_others_running(front):
    # With a temperature the seed chooses where the echo begins, so the answers stop at different places.
    params = SamplingParams(n=6, seed=3, max_tokens=40, stop=("d",))
    answers = await front.complete(front.resolve(await front.encode("abcdefgh"), params))
    assert {a.finish_reason for a in answers} == {FinishReason.STOP}
    texts = {a.text for a in answers}
    assert len(texts) > 1 and all("abcefghabc".find(t) >= 0 or "efghabc".endswith(t) for t in texts)


async def test_the_end_id_ends_an_answer(front):
    ids = [*b"abc", EOS]
    (got,) = await front.complete(front.resolve(ids, SamplingParams(**GREEDY)))
    assert (got.text, got.token_ids, got.finish_reason) == ("abc", ids, "stop")


async def test_an_absent_seed_is_drawn_and_gives_the_answer_again(front):
    ids = await front.encode("0123456789" * 5)
    request = front.resolve(ids, SamplingParams(max_tokens=20))
    again = front.resolve(ids, SamplingParams(max_tokens=20, seed=request.params.seed))
    assert request.id != again.id
    first, second = await front.complete(request), await front.complete(again)
    assert first[0].text == second[0].text
    assert 0 <= request.params.seed < 2**53
    assert request.params.seed != front.resolve(ids, SamplingParams(max_tokens=1)).params.seed


async def test_max_tokens_is_settled_by_the_context(front):
    ids = await front.encode("x" * 500)
    assert front.resolve(ids, SamplingParams(max_tokens=None)).params.max_tokens == 12
    assert front.resolve(ids, SamplingParams(max_tokens=12)).params.max_tokens == 12
    with pytest.raises(InvalidRequest, match=r"500.*13.*512") as error:
        front.resolve(ids, SamplingParams(max_tokens=13))
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("ids", "params", "field", "message"),
    [
        ([1] * 512, {}, "prompt", "512 tokens.*512"),
        ([], {}, "prompt", "empty"),
        ([5, 260], {}, "prompt", "token id 260"),
        ([5, -1], {}, "prompt", "token id -1"),
        ([5], {"stop_token_ids": (260,)}, "stop_token_ids", "260"),
        ([5], {"logit_bias": {261: 1.0}}, "logit_bias", "261"),
        ([5], {"min_tokens": 600, "max_tokens": None}, "min_tokens", "600"),
    ],
)
async def test_requests_that_can_never_be_served_are_refused_by_field(front, ids, params, field, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        front.resolve(ids, SamplingParams(**({"max_tokens": 1} | params)))
    assert error.value.param == field


async def test_texts_become_ids(front):
    assert await front.encode("") == (BOS,)
    assert await front.encode("<eos>") == (EOS,)
    assert await front.encode("<eos>", parse_special=False) == tuple(b"<eos>")
    long = "ab" * 5000  # tokenized in a thread
    assert await front.encode(long, bound=None) == tuple(long.encode())
    assert await front.decode(tuple(b"ab")) == "ab"
    with pytest.raises(InvalidRequest, match="token id 999"):
        await front.decode([999])
    with pytest.raises(InvalidRequest, match="Unicode"):
        await front.encode("\ud800")


async def test_thousands_of_texts_leave_turns_for_other_keys(front):
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(50):
        await front.encode("abc")
    task.cancel()
    assert turns >= 50


async def test_conversations_become_ids(front):
    messages = [{"role": "user", "content": "hi"}]
    assert await front.encode_chat(messages) == tuple(b"user: hi\nassistant: ")
    assert await front.encode_chat(messages, add_generation_prompt=False) == tuple(b"user: hi\n")
    assert await front.encode_chat(messages, continue_final_message=True) == tuple(b"user: hi")
    assert await front.encode_chat(messages, variables={"shout": "!"}) == tuple(b"user: hi\n!assistant: ")
    assert front.template_mentions("shout") and not front.template_mentions("whisper")


async def test_a_template_that_refuses_is_the_requests_fault():
    front = Front(EchoEngine(), byte_tokenizer(), ChatTemplate("{{ raise_exception('no systems') }}"))
    with pytest.raises(TemplateError, match="no systems"):
        await front.encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidRequest, match="chat template"):
        await Front(EchoEngine(), byte_tokenizer()).encode_chat([{"role": "user", "content": "x"}])


async def test_a_model_without_a_tokenizer_takes_ids_alone():
    front = Front(EchoEngine())
    await front.start()
    with pytest.raises(InvalidRequest, match="tokenizer"):
        await front.encode("x")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        front.resolve([5], SamplingParams(stop=("x",), max_tokens=1))
    (got,) = await front.complete(front.resolve([5, 6], SamplingParams(**GREEDY)))
    assert (got.token_ids, got.text) == ([5, 6] * 4, "")
    await front.stop()


async def test_tasks_a_model_cannot_do_are_refused(front):
    vector = await front.embed(front.resolve_embedding([3, 4]))
    assert vector == (7.0, 2.0)
    with pytest.raises(InvalidRequest, match="513 tokens"):
        front.resolve_embedding([1] * 513)
    other = make_front(tasks=(Task.GENERATE,))
    await other.start()
    with pytest.raises(InvalidRequest, match="embed"):
        other.resolve_embedding([1])
    await other.stop()


async def test_an_answer_that_fails_in_the_engine_ends_with_an_error(front):
    (got,) = await front.complete(front.resolve(list(POISON.encode()), SamplingParams(**GREEDY)))
    assert (got.finish_reason, got.error) == (FinishReason.ERROR, "SecretError: inside")
    assert front.meter.finished["error"] == 1


async def test_an_abandoned_stream_releases_everything(front):
    request = front.resolve(await front.encode("abc"), SamplingParams(n=4, max_tokens=400))
    async with aclosing(front.stream(request)) as deltas:
        async for _ in deltas:
            break
    await assert_idle(front)
    assert front.meter.finished["abort"] == 4


@pytest.mark.slow
async def test_a_hundred_streams_with_random_cancels_leave_nothing(front):
    rng = random.Random(1)

    async def one(i: int) -> None:
        params = SamplingParams(n=rng.randint(1, 3), max_tokens=rng.randint(1, 60), seed=i, stop=("zz",))
        request = front.resolve(await front.encode(f"prompt {i} "), params)
        async with aclosing(front.stream(request)) as deltas:
            async for _ in deltas:
                if rng.random() < 0.02:
                    return

    tasks = [asyncio.create_task(one(i)) for i in range(100)]
    await asyncio.sleep(0.05)
    for task in rng.sample(tasks, 30):
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    await assert_idle(front)


async def test_the_meter_counts_what_happened(front):
    await answer(front, "abcd", max_tokens=5)
    await answer(front, "abcd", max_tokens=50, stop=("c",))
    meter = front.meter
    assert meter.finished == {"length": 1, "stop": 1}
    assert (meter.prompt_tokens, meter.generated_tokens, meter.open_requests) == (8, 8, 0)
    interactive = meter.classes[ServiceClass.INTERACTIVE]
    assert interactive.first_token.cumulative()[-1][1] == meter.request.cumulative()[-1][1] == 2
    assert interactive.per_token.cumulative()[-1][1] == 6


async def test_the_meter_judges_answers_by_the_targets_of_their_class():
    """Complete ones alone: what a deadline cut off is counted apart, what was aborted not at all."""
    targets = {ServiceClass.INTERACTIVE: Target(60.0, 60.0), ServiceClass.BATCH: Target(1e-9, 60.0)}
    front = make_front(info={"targets": targets}, step_seconds=0.005)
    await front.start()
    ids, params = await front.encode("abcd"), SamplingParams(**GREEDY, n=2)
    for slo in ServiceClass:
        await front.complete(front.resolve(ids, params, slo=slo))
        await front.complete(front.resolve(ids, params, slo=slo, deadline=0.001))
    await front.embed(front.resolve_embedding(ids, slo=ServiceClass.BATCH))
    async with aclosing(front.stream(front.resolve(ids, params))) as deltas:
        await anext(deltas)
    counted = [(c.in_time, c.late, c.expired) for c in front.meter.classes.values()]
    assert counted == [(2, 0, 2), (0, 3, 2), (0, 0, 2)]
    await assert_idle(front)
    await front.stop()


async def test_errors_of_the_engine_pass_through():
    front = make_front(max_waiting=2, step_seconds=0.02, max_rows=1)
    await front.start()
    ids = await front.encode("abc")
    tasks = [asyncio.create_task(front.complete(front.resolve(ids, SamplingParams(**GREEDY)))) for _ in range(8)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, QueueFull)]
    assert refused and len(refused) < 8 and all(r[0].text == "abcabcab" for r in results if r not in refused)
    stopping = asyncio.create_task(front.complete(front.resolve(ids, SamplingParams(max_tokens=300))))
    await asyncio.sleep(0.05)
    await asyncio.gather(front.stop(), front.stop())
    with pytest.raises(EngineDead):
        await stopping
    with pytest.raises(EngineDead):
        await front.complete(front.resolve(ids, SamplingParams(**GREEDY)))
