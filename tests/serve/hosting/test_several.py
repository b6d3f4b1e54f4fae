"""A server of several models: loads are shared, no busy model is unloaded, no engine leaks."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config import EngineOptions
from kvasir.errors import ConfigError, EngineDead, InvalidRequest, ModelFileError, ModelNotFound
from kvasir.serve.hosting.memory_budget import needed, unloading
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from kvasir.store.entry import Details
from tests.examples import examples
from tests.serve.shelf import MIB, NAMES, Broken, Launcher, Shelf, offer, several


async def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def test_a_load_is_shared_and_stays_for_a_while():
    launcher = Launcher(gate=asyncio.Event())
    async with several(launcher, keep_alive=0.05) as catalogue:

        async def ask():
            async with catalogue.lease("a") as serving:
                assert serving.names == ("a",) and not serving.front.engine.ended
                return serving

        asking = [asyncio.ensure_future(ask()) for _ in range(5)]
        await until(lambda: launcher.loads)
        assert catalogue.loaded() == []
        asking.pop().cancel()
        launcher.gate.set()
        assert len(set(await asyncio.gather(*asking))) == 1 and launcher.loads == 1
        assert catalogue.expires(catalogue.loaded()[0]) == pytest.approx(time.time() + 0.05, abs=1)
        await ask()
        assert launcher.loads == 1
        await until(lambda: not launcher.there)
        await ask()
        assert launcher.loads == 2


async def test_the_last_requested_keep_alive_applies():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        async with catalogue.lease("a", -1) as serving:
            pass
        assert launcher.there == ["a"] and catalogue.expires(serving) is None
        async with catalogue.lease("a"), catalogue.lease("a", 0):
            pass
        await until(lambda: not launcher.there)
        async with catalogue.lease("a") as serving:
            assert catalogue.expires(serving) is None, "as long as it is leased"
        assert catalogue.expires(serving) > time.time() + 200, "what was asked for went with the engine"


async def test_a_load_continues_without_a_waiting_request():
    launcher = Launcher(gate=asyncio.Event())
    async with several(launcher, keep_alive=60) as catalogue:
        asking = asyncio.ensure_future(catalogue.lease("a").__aenter__())
        await until(lambda: launcher.loads)
        asking.cancel()
        await asyncio.wait([asking])
        launcher.gate.set()
        await until(lambda: launcher.there)
        async with catalogue.lease("a"):
            assert launcher.loads == 1


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ModelFileError("bad header", "pull it again"), InvalidRequest, r"a cannot be loaded: bad header .pull it"),
        (ConfigError("does not fit"), InvalidRequest, "a cannot be loaded"),
        (EngineDead("it ended"), EngineDead, "it ended"),
        (Broken("x"), Broken, "x"),
        (OSError("secret"), EngineDead, r"a could not be loaded .*the server's log"),
    ],
)
async def test_a_failed_load_is_an_error_of_the_waiting_requests(error, kind, message):
    launcher = Launcher({"a": error})
    async with several(launcher) as catalogue:
        results = await asyncio.gather(*(catalogue.lease("a").__aenter__() for _ in range(3)), return_exceptions=True)
        assert launcher.loads == 1
        for result in results:
            assert isinstance(result, kind)
        with pytest.raises(kind, match=message):
            raise results[0]
        async with catalogue.lease("b"):
            assert launcher.there == ["b"]
        launcher.failing.clear()
        async with catalogue.lease("a"):
            assert sorted(launcher.there) == ["a", "b"]


async def test_unknown_and_missing_model_names_are_refused():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        with pytest.raises(ModelNotFound, match=r"'z'.*'a', 'b', 'c'"):
            async with catalogue.lease("z"):
                pass
        with pytest.raises(InvalidRequest, match="'a', 'b', 'c'"):
            async with catalogue.lease(None):
                pass
        assert [card.name for card in await catalogue.cards()] == list(NAMES)
        assert (await catalogue.card("a")).max_model_len == 512
    async with several(launcher, Shelf([offer("a")])) as catalogue, catalogue.lease(None) as serving:
        assert serving.names == ("a",)


async def test_the_one_used_least_recently_makes_room():
    launcher = Launcher()
    async with several(launcher, max_loaded=2) as catalogue:
        for name in ("a", "b", "a", "c"):
            async with catalogue.lease(name):
                pass
        assert launcher.there == ["a", "c"] and launcher.most == 2


async def test_a_busy_model_is_waited_for_and_then_refused():
    launcher = Launcher()
    async with several(launcher, max_loaded=1, patience=0.05) as catalogue, catalogue.lease("a"):
        with pytest.raises(EngineDead, match=r"^b "):
            async with catalogue.lease("b"):
                pass
        assert launcher.there == ["a"]
    async with several(Launcher(), max_loaded=1, patience=30) as catalogue:
        async with catalogue.lease("a"):
            waiting = asyncio.ensure_future(catalogue.lease("b").__aenter__())
            await asyncio.sleep(0)
        assert (await waiting).names == ("b",)


async def test_memory_is_divided_between_models():
    launcher, total = Launcher(), 10_000 * MIB
    sizes = {"a": 3000 * MIB, "b": 3000 * MIB, "c": 7000 * MIB, "d": 20_000 * MIB}
    shelf = Shelf([offer(name, size) for name, size in sizes.items()])

    def available() -> int:
        return total - sum(sizes[name] for name in launcher.there)

    async with several(launcher, shelf, available=available) as catalogue:
        for name in ("a", "b"):
            async with catalogue.lease(name):
                pass
        assert launcher.there == ["a", "b"]
        kv = [options.kv_memory for options, _ in launcher.launched]
        assert sum(kv) + sizes["a"] + sizes["b"] < total and min(kv) >= 512 * 1024
        async with catalogue.lease("c"):
            assert launcher.there == ["c"], "both had to go"
            with pytest.raises(EngineDead, match=r"^d .*19\.9 GiB"):
                async with catalogue.lease("d"):
                    pass
            assert launcher.there == ["c"]
        async with catalogue.lease("a"):
            assert launcher.there == ["a"]
    context = Shelf([offer("a", 1000 * MIB), offer("big", 9800 * MIB)])
    context.set(offer("a", 1000 * MIB, details=Details(context_length=65536, kv_bytes_per_token=50_000)))
    launcher = Launcher()
    async with several(launcher, context, available=lambda: total) as catalogue:
        async with catalogue.lease("a"):
            pass
        whole = 65536 * 50_000
        assert whole < launcher.launched[0][0].kv_memory < 1.2 * whole, "a whole context, which half can hold"
        with pytest.raises(EngineDead, match=r"^big "):
            async with catalogue.lease("big"):
                pass
        assert launcher.there == ["a"], "nothing goes for what will not fit"
    given = Shelf([offer("a", options=lambda: EngineOptions("a", kv_memory=123))])
    launcher = Launcher()
    async with several(launcher, given, available=lambda: total) as catalogue, catalogue.lease("a"):
        assert launcher.launched[0][0].kv_memory == 123, "what the user says stands"
    launcher = Launcher()
    async with several(launcher, max_loaded=3) as catalogue, catalogue.lease("a"), catalogue.lease("b"):
        assert [o.memory_fraction for o, _ in launcher.launched] == pytest.approx([0.3, 0.45]), "of a device unseen"
        assert [o.host_share for o, _ in launcher.launched] == pytest.approx([1 / 3, 1 / 3]), "of the host"


# -- waiting for a place -------------------------------------------------------------------------------------


@asynccontextmanager
async def of_sizes(launcher: Launcher, total: int, patience: float = 30.0, **sizes: int):
    """A server with so many GiB of memory, and models of such sizes."""
    shelf = Shelf([offer(name, size * 1024 * MIB) for name, size in sizes.items()])

    def available() -> int:
        return (total - sum(sizes[name] for name in launcher.there)) * 1024 * MIB

    async with several(launcher, shelf, available=available, patience=patience, max_loaded=9) as catalogue:
        yield catalogue


def ask(catalogue: ModelManager, name: str) -> asyncio.Future:
    async def once() -> None:
        async with catalogue.lease(name):
            pass

    return asyncio.ensure_future(once())


async def test_a_load_that_waits_for_memory_blocks_no_other():
    launcher = Launcher()
    async with of_sizes(launcher, 12, a=4, big=9, small=2, tiny=1) as catalogue:
        async with catalogue.lease("a"):
            waiting = ask(catalogue, "big")
            await until(lambda: "big" in catalogue.waiting)
            async with asyncio.timeout(10):
                await ask(catalogue, "a")
                await ask(catalogue, "small")
                async with catalogue.lease("tiny"):
                    assert not waiting.done() and launcher.there == ["a", "small", "tiny"], "for nothing none has gone"
        await waiting
        assert launcher.there == ["tiny", "big"] or launcher.there == ["big"]


async def test_memory_promised_to_a_model_is_not_given_to_another():
    launcher = Launcher()
    async with of_sizes(launcher, 12, a=8, b=8, c=8) as catalogue:
        async with catalogue.lease("a"):
            first, second = ask(catalogue, "b"), ask(catalogue, "c")
            await until(lambda: len(catalogue.waiting) == 2)
        await first
        assert launcher.launched[1][0].model == "b", "the one that came first"
        await second
        assert launcher.there == ["c"] and launcher.loads == 3


async def test_models_that_fit_are_loaded_at_once_unless_their_memory_cannot_be_seen():
    for seen, loads in ((True, 3), (False, 1)):
        launcher = Launcher(gate=asyncio.Event())
        options = {"available": lambda: 1 << 40} if seen else {}
        async with several(launcher, **options) as catalogue:
            asking = [ask(catalogue, name) for name in NAMES]
            await until(lambda: sum(held.placed for held in catalogue.held) == 3)
            await asyncio.sleep(0.01)
            assert launcher.loads == loads
            launcher.gate.set()
            await asyncio.gather(*asking)
            assert launcher.loads == 3


SIZES = st.fixed_dictionaries({name: st.integers(1, 7) for name in "abcd"})


@examples(25)
@given(SIZES, st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.integers(0, 6)), max_size=14))
def test_memory_is_never_promised_twice_and_every_model_that_fits_is_served(sizes, leases):
    async def run() -> None:
        launcher = Launcher()
        async with of_sizes(launcher, 8, **sizes) as catalogue:

            async def lease(name: str, begin: int, ticks: int) -> None:
                await asyncio.sleep(begin / 1000)
                async with catalogue.lease(name) as serving:
                    for _ in range(ticks):
                        assert not serving.front.engine.ended
                        assert sum(sizes[name] for name in launcher.there) < 8
                        await asyncio.sleep(0.001)

            async with asyncio.timeout(20):
                await asyncio.gather(*(lease(*reported) for reported in leases))
            assert not catalogue.waiting

    asyncio.run(run())


def test_streamed_weights_need_no_more_memory_than_they_are_given():
    one = offer("a", size=100 * MIB)
    (whole, kv), (streamed, same_kv) = (
        needed(one, EngineOptions("a")),
        needed(one, EngineOptions("a", weights_memory=MIB)),
    )
    assert whole - streamed == 99 * MIB and kv == same_kv
    assert needed(one, EngineOptions("a", weights_memory=1 << 40))[0] == whole


@given(
    st.integers(1, 20), st.none() | st.integers(0, 20), st.integers(-2, 3), st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.integers(0, 9), max_size=4),
)  # fmt: skip
def test_as_few_models_as_possible_are_unloaded(need, free, places, ending, idle):
    def fits(count: int) -> bool:
        gone = ending + idle[:count]
        return places + len(gone) >= 1 and (free is None or free + sum(gone) >= need)

    count = unloading(need, free, places, ending, idle)
    assert (fits(count) and not any(map(fits, range(count)))) if count is not None else not fits(len(idle))


# -- how long models stay ------------------------------------------------------------------------------------


async def test_the_keep_alive_of_one_key_does_not_shorten_anothers():
    """A model stays until the time of the last of its users is over; who manages speaks for all."""
    launcher = Launcher()
    async with several(launcher, keep_alive=300) as catalogue:

        async def use(owner: str, keep_alive: float | None = None, manages: bool = False) -> float | None:
            async with catalogue.lease("a", keep_alive, owner=owner, manages=manages) as serving:
                pass
            expires = catalogue.expires(serving)
            return None if expires is None else expires - time.time()

        await use("ann", 0)
        await until(lambda: not launcher.there)  # she had it alone
        await use("ann")
        assert await use("bob", 0) == pytest.approx(300, abs=5)
        assert await use("bob", 900) == pytest.approx(900, abs=5)
        assert await use("ann", 0) == pytest.approx(900, abs=5)
        assert await use("bob", 0.005) is not None
        await until(lambda: not launcher.there)
        await use("ann", -1)
        assert launcher.there and await use("bob", 0) is None, "for ever"
        assert await use("root", 5, manages=True) == pytest.approx(5, abs=1)
        assert await use("ann") == pytest.approx(5, abs=1), "for all that come, too"
        async with catalogue.lease("a", owner="ann"):
            await use("root", 0, manages=True)
            assert launcher.there
        await until(lambda: not launcher.there)


# -- what changes --------------------------------------------------------------------------------------------


async def test_a_changed_model_is_reloaded_and_running_requests_finish():
    launcher = Launcher()
    shelf = Shelf([offer("a"), offer("b")])
    async with several(launcher, shelf) as catalogue:
        async with catalogue.lease("a") as old:
            shelf.set(offer("a", identity="2"))
            async with catalogue.lease("a") as new:
                assert new is not old and not old.front.engine.ended
                assert catalogue.loaded() == [new] and launcher.there == ["a", "a"]
        await until(lambda: launcher.there == ["a"])
        shelf.remove("a")
        async with catalogue.lease("b"):
            await until(lambda: launcher.there == ["b"])
        with pytest.raises(ModelNotFound):
            async with catalogue.lease("a"):
                pass


async def test_an_engine_that_died_for_good_is_replaced():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        async with catalogue.lease("a") as serving:
            await serving.front.engine.stop()
        async with catalogue.lease("a") as serving:
            assert not serving.front.engine.ended and launcher.loads == 2


async def test_shutdown_ends_loads_and_streams():
    launcher = Launcher(gate=asyncio.Event())
    catalogue = ModelManager(Shelf([offer("a"), offer("b")]), launcher, ServeSettings())
    waiting = asyncio.ensure_future(catalogue.lease("a").__aenter__())
    await until(lambda: launcher.loads)
    await asyncio.gather(catalogue.stop(), catalogue.stop())
    with pytest.raises(EngineDead, match="server"):
        await waiting
    with pytest.raises(EngineDead, match="server"):
        await catalogue.lease("b").__aenter__()


KEEP = st.sampled_from([None, None, -1, 0, 0.002])
LEASE = st.tuples(st.sampled_from(NAMES), KEEP, st.integers(0, 8), st.integers(0, 6), st.booleans())
CHANGE = st.tuples(st.integers(0, 12), st.sampled_from(NAMES), st.sampled_from(["fail", "mend", "change", "remove"]))


@examples(30)
@given(st.lists(LEASE, max_size=12), st.lists(CHANGE, max_size=4), st.integers(1, 3))
def test_no_leased_model_is_unloaded_and_no_request_waits_for_ever(leases, changes, max_loaded):
    async def run() -> None:
        launcher, shelf = Launcher(), Shelf([offer(name) for name in NAMES])
        async with several(launcher, shelf, keep_alive=0.003, max_loaded=max_loaded, patience=0.01) as catalogue:

            async def lease(name, keep_alive, begin, ticks, leaves) -> None:
                await asyncio.sleep(begin / 1000)
                try:
                    async with catalogue.lease(name, keep_alive) as serving:
                        for _ in range(ticks):
                            assert not serving.front.engine.ended
                            if leaves:
                                asyncio.current_task().cancel()
                            await asyncio.sleep(0.001)
                except (EngineDead, ModelNotFound, InvalidRequest):
                    pass

            async def change(begin, name, kind) -> None:
                await asyncio.sleep(begin / 1000)
                match kind:
                    case "fail":
                        launcher.failing[name] = ModelFileError("x")
                    case "mend":
                        launcher.failing.clear()
                    case "change":
                        shelf.set(offer(name, identity=str(begin)))
                    case "remove":
                        shelf.remove(name)

            tasks = [asyncio.ensure_future(lease(*reported)) for reported in leases]
            tasks += [asyncio.ensure_future(change(*reported)) for reported in changes]
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError), result
            assert launcher.most <= max_loaded
            assert all(held.leases == 0 for held in catalogue.held)
            kept = {reported[0] for reported in leases if reported[1] == -1}
            await until(lambda: all(name in kept for name in launcher.there))

    asyncio.run(run())
