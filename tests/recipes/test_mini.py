"""The recipe of kvasir-mini: its data, its chat format, its checkpoints, and the folder it ships."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from recipes.mini import data, eval, export, model, train
from recipes.mini.chat import encode, render, render_case
from recipes.mini.generate import load
from recipes.mini.skills import HELD, TRAIN, arithmetic, dialogue, memory, split_of, tools
from tests.examples import examples

MAKERS = [row.make for row in eval.ROWS]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder() -> Path:
    if not (eval.FOLDER / "model.safetensors").exists():
        pytest.skip("the bundled model is not there; python -m recipes.mini.export writes it")
    return eval.FOLDER


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# --- data ---


def test_same_seed_same_conversations():
    first, second = ([render_case(dialogue(Random(i), 150)) for i in range(50)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 45


@pytest.mark.parametrize("make", MAKERS, ids=[row.name for row in eval.ROWS])
def test_every_row_accepts_its_own_answer(make):
    row = eval.ROWS[MAKERS.index(make)]
    for seed in range(30):
        case = make(Random(seed))
        prompt = render(case.prompt, case.tools, thinking=case.thinking)
        answer = render_case(case).removeprefix(prompt).removesuffix("<|im_end|>\n")
        assert row.name == "story" or row.right(case, answer), answer


def test_training_never_draws_a_held_out_key():
    rng = Random(0)
    for _ in range(500):
        a, b = arithmetic.addends(rng, TRAIN)
        assert split_of(("add", min(a, b), max(a, b))) == TRAIN
        assert split_of(("sub", *arithmetic.minuends(rng, TRAIN))) == TRAIN


def test_sums_of_the_splits_are_disjoint():
    def pairs(split: str) -> set[frozenset[int]]:
        return {frozenset(arithmetic.addends(rng, split)) for _ in range(2000)}

    rng = Random(1)
    assert not pairs(TRAIN) & pairs(HELD)


def test_held_out_names_never_occur_in_training():
    rng = Random(2)
    reported = [memory.facts(rng, TRAIN, 3) for _ in range(300)]
    held = [memory.facts(rng, HELD, 3) for _ in range(300)]

    def open_ended(sets: list[dict[str, str]]) -> set[str]:
        return {v for f in sets for n, v in f.items() if memory.ATTRIBUTES[n].open_ended}

    assert open_ended(reported) and not open_ended(reported) & open_ended(held)


def test_wanted_call_fits_a_tool_of_the_prompt():
    for seed in range(100):
        case = tools.tool_call(Random(seed), HELD)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in case.tools or []}
        assert set(case.want["arguments"]) == set(schemas[case.want["name"]]["required"])


# --- chat template ---


def test_prompt_is_a_prefix_of_the_conversation():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    prompt = render(messages[:1])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages, generate=False) == prompt + "Hello<|im_end|>\n"


def test_arguments_may_be_a_mapping_or_a_string():
    def text(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return render([{"role": "assistant", "content": None, "tool_calls": [call]}], generate=False)

    assert text({"a": "é<"}) == text('{"a": "é<"}')
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>' in text({"a": "é<"})


def test_reasoning_stays_out_of_earlier_turns():
    reply = [
        {"role": "assistant", "content": "a", "reasoning_content": "deep"},
        {"role": "user", "content": "b"},
    ]
    asked = [{"role": "user", "content": "q"}]
    assert "deep" not in render([*asked, *reply])
    assert "deep" in render([*asked, *reply[:1]], generate=False)
    assert "deep" not in render([*asked, {"role": "assistant", "content": "<think>\ndeep</think>a"}, *reply[1:]])


def test_system_turn_holds_prompt_tools_and_thinking():
    text = render([{"role": "system", "content": "Be kind."}], [TOOL], thinking=True)
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n<tools>\n" + json.dumps(TOOL["function"]))
    assert text.endswith("</tools>\n/think<|im_end|>\n<|im_start|>assistant\n")


def test_content_may_be_a_list_of_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "ab"}])


# --- training ---


def test_answers_are_learned_and_only_the_last_when_thinking(tokenizer: Tokenizer):
    encoder = data.Encoder(tokenizer)
    case = arithmetic.addition(Random(0), TRAIN)
    ids, learn = encoder(case, Random(0))
    first, last = encoder.answers(ids)[-1]
    assert tokenizer.decode(ids[first:last], skip_special_tokens=False) == case.answer
    assert all(learn[first - 1 : last]) and not learn[-1]


def test_packed_conversations_do_not_see_each_other(tokenizer: Tokenizer):
    encoder = data.Encoder(tokenizer)
    encoded = [encoder(dialogue(Random(i), 50), Random(i)) for i in (1, 2)]
    size = sum(len(ids) for ids, _ in encoded) + 3
    packed = data.pack([encoded], size)
    net = model.Mini(model.MiniConfig(layers=2)).init(0)
    hidden = net(packed.ids, packed.mask(), torch.arange(size)[None])
    at = len(encoded[0][0])
    alone = data.pack([[encoded[1]]], len(encoded[1][0]))
    other = net(alone.ids, alone.mask(), torch.arange(at, at + alone.ids.shape[1])[None])
    torch.testing.assert_close(hidden[:, at : at + alone.ids.shape[1]], other, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(tokenizer: Tokenizer, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(data, "SHAPES", [(1, 256)])
    monkeypatch.setattr(data, "SHAPE_WEIGHTS", [1])

    def run(name: str, *stops: int) -> dict[str, torch.Tensor]:
        work = tmp_path / name
        work.mkdir()
        tokenizer.save(str(work / "tokenizer.json"))
        for stop in stops:
            options = ["--steps", str(stop), "--work", str(work), "--workers", "1", "--fall", "1e-9"]
            train.train(train.arguments().parse_args(options))
        return train.read(work / "checkpoint.safetensors")[0]

    whole, parts = run("whole", 3), run("parts", 2, 3)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


# --- the bundled folder ---


@examples(60)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(text: str):
    path = eval.FOLDER / "tokenizer.json"
    if not path.exists():
        pytest.skip("the bundled model is not there")
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_digits_are_single_tokens_and_tags_show(tokenizer: Tokenizer):
    assert len(encode(tokenizer, "0123456789")) == 10
    text = "<think>\n</think>\n\n<tool_call></tool_call><|im_end|>"
    assert tokenizer.decode(encode(tokenizer, text)) == text.removesuffix("<|im_end|>")


def test_folder_is_small_and_whole(folder: Path):
    assert sum(f.stat().st_size for f in folder.iterdir()) <= export.LIMIT
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] % 256 == 0 and config["intermediate_size"] % 256 == 0
    assert config["vocab_size"] == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert "demo" in (folder / "MODEL_CARD.md").read_text()


def test_bundled_model_adds_and_recalls(folder: Path):
    bundled = load(folder)
    prompts = [render([{"role": "user", "content": t}]) for t in ("What is 23 + 45?", "Hello! Who are you?")]
    total, name = bundled.answers(prompts, 40)
    assert "68" in total and "Kvasir-mini" in name


def test_batched_answers_equal_single_ones(folder: Path):
    bundled = load(folder)
    prompts = [render(arithmetic.addition(Random(i), HELD).prompt) for i in range(6)]
    assert bundled.answers(prompts, 20) == [bundled.answers([p], 20)[0] for p in prompts]


def test_weights_survive_the_way_through_hf_names(folder: Path):
    net = load(folder).mini
    again = model.from_hf(net.config, model.to_hf(net))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_forward_equals_transformers(folder: Path):
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([encode(load(folder).tokenizer, render([{"role": "user", "content": "What is 2 + 5?"}]))])
    mini = load(folder).mini
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    with torch.inference_mode():
        ours = mini.logits(mini(ids, mask, torch.arange(ids.shape[1])[None]))
        torch.testing.assert_close(ours, theirs(ids).logits, atol=1e-4, rtol=1e-4)
