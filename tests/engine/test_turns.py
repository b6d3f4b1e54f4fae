"""Turns of texts to be tokenized: keys in turn, places for short texts, bounds, and clients that leave."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvasir.config import EngineOptions
from kvasir.engine import turns
from kvasir.engine.front import Front
from kvasir.engine.turns import ASKER, LONG_BYTES, Asker, Turns
from kvasir.errors import InvalidRequest, QueueFull, TextTooLong
from kvasir.text import slices, tokenizer_process
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateLimits, TemplateRenderer
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import SamplingParams
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.text import hostile
from tests.text.vocabularies import any_tokenizer


class Gate:
    """Work that notes who does it and waits to be let through."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.open = threading.Event()

    def __call__(self, name: str):
        def work(hold):
            self.order.append(name)
            assert self.open.wait(60)
            return name

        return work


def ask(queue: Turns, key: str, name: str, gate: Gate, size: int = 1) -> asyncio.Task[str]:
    async def one() -> str:
        ASKER.set(Asker(key))
        return await queue.run(size, gate(name))

    return asyncio.ensure_future(one())


async def all_free(queue: Turns, places: int) -> None:
    """Asserts that all places can be taken at once, one of them by a text that takes all bytes of key a."""
    gate = Gate()
    asked = [ask(queue, "a", "0", gate, turns.MAX_BYTES_PER_KEY)]
    asked += [ask(queue, "b", f"{i}", gate) for i in range(1, places)] + [ask(queue, "c", "last", gate)]
    await until(lambda: len(gate.order) == places)
    assert "last" not in gate.order, "there are no more places"
    gate.open.set()
    await asyncio.gather(*asked)


def under_way(monkeypatch, owner: type, name: str) -> list[str]:
    """An entry for each call of the method that has begun and not ended."""
    calls, real = [], getattr(owner, name)

    def noted(*args, **kwargs):
        calls.append(name)
        try:
            return real(*args, **kwargs)
        finally:
            calls.remove(name)

    monkeypatch.setattr(owner, name, noted)
    return calls


def sizes_of_turns(monkeypatch) -> list[int]:
    """The sizes of the texts for which turns are taken from now on."""
    sizes, run = [], Turns.run

    async def noted(self, size, work):
        sizes.append(size)
        return await run(self, size, work)

    monkeypatch.setattr(Turns, "run", noted)
    return sizes


async def until(fact) -> None:
    for _ in range(4000):
        if fact():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to be")


def test_keys_take_turns_whatever_one_of_them_sends():
    async def main():
        queue, gate = Turns(1), Gate()
        tasks = [ask(queue, "a", f"a{i}", gate) for i in range(6)]
        await until(lambda: gate.order)
        tasks += [ask(queue, "b", f"b{i}", gate) for i in range(2)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)
        assert gate.order.index("b0") <= 2 and gate.order.index("b1") <= 4
        await all_free(queue, 1)
        queue.close()

    asyncio.run(main())


def test_long_texts_leave_a_place_to_short_ones():
    async def main():
        queue, gate, pass_by = Turns(2), Gate(), Gate()
        pass_by.open.set()
        long = [ask(queue, "a", f"long{i}", gate, LONG_BYTES) for i in range(3)]
        await until(lambda: gate.order)
        assert await ask(queue, "b", "short", pass_by) == "short"
        assert gate.order == ["long0"]
        gate.open.set()
        await asyncio.gather(*long)
        await all_free(queue, 2)
        queue.close()

    asyncio.run(main())


def test_a_key_with_too_many_waiting_texts_is_refused_alone(monkeypatch):
    async def main():
        monkeypatch.setattr(turns, "MAX_WAITING_PER_KEY", 2)
        monkeypatch.setattr(turns, "MAX_BYTES_PER_KEY", 10)
        queue, gate = Turns(1), Gate()
        tasks = [ask(queue, "a", str(i), gate) for i in range(3)]
        await until(lambda: gate.order)
        with pytest.raises(QueueFull):
            await ask(queue, "a", "too many", gate)
        tasks.append(ask(queue, "b", "b", gate))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await ask(queue, "b", "too heavy", gate, 20)
        gate.open.set()
        await asyncio.gather(*tasks)
        assert await ask(queue, "a", "as much again", gate, 10) == "as much again"
        queue.close()

    asyncio.run(main())


def test_cancelling_gives_the_place_back_when_waiting_and_when_running(monkeypatch):
    async def main():
        monkeypatch.setattr(turns, "MAX_WAITING_PER_KEY", 1)
        queue, gate = Turns(1), Gate()
        first = ask(queue, "a", "first", gate)
        await until(lambda: gate.order)
        second = ask(queue, "a", "second", gate)
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        third, instead = ask(queue, "b", "third", gate), ask(queue, "a", "instead", gate)
        await asyncio.sleep(0.01)
        assert gate.order == ["first"], "the thread still works for it"
        gate.open.set()
        await asyncio.gather(third, instead)
        assert sorted(gate.order) == ["first", "instead", "third"]
        await all_free(queue, 1)
        queue.close()

    asyncio.run(main())


def test_a_disconnect_ends_the_tokenizing_of_its_long_text(tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_folder(hostile.endless(tmp_path))
    text, gone, beats = hostile.HANGS * LONG_BYTES, asyncio.Event(), 0
    calls = under_way(monkeypatch, Tokenizer, "encode_many")

    async def while_here(work):
        task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        return await task

    async def main():
        nonlocal beats
        front = Front(EchoEngine(), tokenizer, template())
        await front.start()
        ASKER.set(Asker("a", while_here))
        job = asyncio.ensure_future(front.encode(text, bound=None))
        await until(lambda: job.done() or calls)
        for _ in range(20):
            beats += 1
            await asyncio.sleep(0.005)
        assert not job.done()
        gone.set()
        with pytest.raises(asyncio.CancelledError):
            await job
        await until(lambda: not calls)
        await front.stop()

    monkeypatch.setattr(tokenizer_process, "SECONDS", 300.0)
    monkeypatch.setattr(tokenizer_process, "MOST_SECONDS", 300.0)
    try:
        asyncio.run(main())
        assert beats == 20
    finally:
        tokenizer.close()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    async def main():
        front = Front(EchoEngine(max_model_len=64), byte_tokenizer(), template())
        await front.start()
        per, used = byte_tokenizer().table.bytes_per_token, []
        monkeypatch.setattr(Tokenizer, "encode_many", lambda *_, **__: used.append(1) or [[1]])
        size = per * 64 + 1
        with pytest.raises(TextTooLong, match=f"{size} bytes.*64 tokens.*{size - 1}"):
            await front.encode("x" * size)
        with pytest.raises(InvalidRequest):
            await front.encode("é" * size)
        assert not used
        await front.encode("x" * (size - 1))
        await front.encode("x" * size, bound=None)
        assert len(used) == 2
        await front.stop()

    asyncio.run(main())


def test_a_long_text_is_refused_once_its_first_slices_are_too_long(monkeypatch):
    asked, real = [], slices.whole
    monkeypatch.setattr(
        slices, "whole", lambda library, text, special: asked.append(len(text)) or real(library, text, special)
    )

    async def main():
        front = Front(EchoEngine(max_model_len=64), any_tokenizer("tiny wordpiece"), template())
        await front.start()
        text = "the cat plays " * 100_000
        for bound in ("context", "count"):
            with pytest.raises(TextTooLong, match=r"1400000 bytes.*64 tokens") as error:
                await front.encode(text, bound=bound)
            assert f"{1 << 20} bytes" in error.value.hint
        assert sum(asked) < len(text) / 10
        some = await front.encode(text, bound=None, first=64)
        assert 64 < len(some) < 20_000
        counted = await front.encode(text[: 1 << 20], bound="count")
        assert len(counted) > len(some) and counted[: len(some)] == some
        spaces = await front.encode("the" + " " * (2 << 20) + "cat")
        assert spaces == await front.encode("the cat")
        await front.stop()

    asyncio.run(main())


def test_texts_are_tokenized_together_as_each_alone(monkeypatch):
    async def main():
        front = Front(EchoEngine(), byte_tokenizer(), template())
        await front.start()
        short, long = ["", "a", "bé", "c" * 50] * 100, "d" * (LONG_BYTES + 1)
        alone = {text: await front.encode(text, bound=None) for text in {*short, long}}
        turns_taken = sizes_of_turns(monkeypatch)
        for texts in (short, [long, long], [*short, long, *short], []):
            assert await front.encode_all(texts, bound=None) == [alone[text] for text in texts]
        assert len(turns_taken) == 1 + 2 + 3
        with pytest.raises(TextTooLong, match="65537 bytes"):
            await front.encode_all([*short, long])
        await front.stop()

    asyncio.run(main())


def test_bad_words_breakers_and_biases_wait_for_their_turn(monkeypatch):
    async def main():
        front, sizes = Front(EchoEngine(), byte_tokenizer(), template()), sizes_of_turns(monkeypatch)
        await front.start()
        await front.learn(SamplingParams(bad_words=("abc", "d"), dry_sequence_breakers=()))
        await front.learn(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("\n", "ab")))
        assert await front.in_turn(5, lambda: "found") == "found"
        assert sizes == [4, 3, 5]
        await front.stop()

    asyncio.run(main())


SLOW = "{% for m in messages %}{{ m.content }}{% if 'slow' in m.content %}" + (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


def slowly(seconds: float) -> Front:
    renderer = TemplateRenderer(TemplateLimits(seconds=seconds))
    return Front(EchoEngine(), byte_tokenizer(), ChatTemplate(SLOW, renderer=renderer))


def chat(front: Front, asker: str | Asker, content: str, **more) -> asyncio.Task:
    async def one():
        ASKER.set(asker if isinstance(asker, Asker) else Asker(asker))
        return await front.render_chat([{"role": "user", "content": content}], **more)

    return asyncio.ensure_future(one())


@pytest.mark.parametrize("how", ["long", "template"])
def test_slow_rendering_leaves_a_place_for_other_keys(how, monkeypatch):
    async def main():
        front, rendering = slowly(0.5), under_way(monkeypatch, ChatTemplate, "render")
        more = {"chat_template": SLOW} if how == "template" else {}
        content = "slow" * (1 if more else LONG_BYTES)
        await chat(front, "b", "quick")
        slow = [chat(front, "a", content, **more) for _ in range(6)]
        await asyncio.sleep(0)
        assert (await chat(front, "b", "quick")).text == "quick"
        assert sum(task.done() for task in slow) < 2, "their limits end them one after the other"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await until(lambda: not rendering)

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_rendering_of_its_conversation(monkeypatch):
    async def main():
        front, gone = slowly(300.0), asyncio.Event()
        rendering = under_way(monkeypatch, ChatTemplate, "render")

        async def while_here(work):
            task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            return await task

        task = chat(front, Asker("a", while_here), "slow" * LONG_BYTES)
        await until(lambda: rendering)
        await asyncio.sleep(0.05)
        assert not task.done()
        gone.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not rendering)

    asyncio.run(main())


def test_a_burst_of_chats_waits_while_the_first_of_them_is_learnt_from():
    async def main():
        front = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(SLOW))
        tasks = [chat(front, "a", str(i)) for i in range(EngineOptions("").max_waiting)]
        assert [found.text for found in await asyncio.gather(*tasks)] == [str(i) for i in range(len(tasks))]

    asyncio.run(main())
