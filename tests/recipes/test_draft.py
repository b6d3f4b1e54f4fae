"""The recipe of the drafters: what they are trained on, how they draft, and the folders they become."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from kvasir.models.mtp import MultiTokenDraft
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_head import load_head
from kvasir.weights.find import find_model
from recipes.mini import data, eval, generate
from recipes.mini.draft import answers, evaluate, folders, train, unroll
from recipes.mini.draft.heads import Eagle3, Head, HeadConfig, Mtp
from recipes.mini.draft.optimizers import orthogonal
from recipes.mini.model import Mini, MiniConfig, norm, rope_tables, to_hf
from recipes.mini.skills import TRAIN, arithmetic
from tests.layers.parts import batch_of
from tests.models.driver import make_cache, piece

CONFIG = MiniConfig(hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=32)
VOCAB = torch.arange(3, CONFIG.vocab, 4)  # ids that the tests' EAGLE-3 head can draft
KINDS = ("draft", "eagle3", "mtp")


@pytest.fixture(scope="module")
def target() -> Mini:
    return Mini(CONFIG).init(5).requires_grad_(False)


@pytest.fixture(scope="module")
def encoder() -> data.Encoder:
    if not (eval.FOLDER / "tokenizer.json").exists():
        pytest.skip("the bundled model is not there; python -m recipes.mini.export writes it")
    return data.Encoder(Tokenizer.from_file(str(eval.FOLDER / "tokenizer.json")))


@pytest.fixture(scope="module")
def conversations(encoder: data.Encoder) -> list[answers.Answered]:
    rng = Random(3)
    return [answers.unanswered(encoder, arithmetic.addition(rng, TRAIN)) for _ in range(24)]


def drafter(kind: str, target: Mini) -> Mini | Head:
    if kind == "draft":
        return Mini(folders.draft_config(CONFIG, 32, 1, 48, 2, 1)).init(1)
    if kind == "mtp":
        return Mtp(target).init(1)
    return Eagle3(CONFIG, HeadConfig(ffn=48, draft_vocab=len(VOCAB), aux=(0, 1, 3)), VOCAB).init(target, 1)


def shaken(head: Head) -> Head:
    """The same with other norms than those of 1 that training begins with."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in head.parameters():
            p += torch.randn(p.shape, generator=generator) * 0.1
    return head


# --- what drafters are trained on ---


def test_noise_depends_on_seed_and_position_only():
    both, alone = answers.gumbel([(1, 7), (2, 7), (1, 8)], 300), answers.gumbel([(2, 7)], 300)
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1]) and not torch.equal(both[0], both[2])
    assert abs(both.mean() - 0.577) < 0.1 and torch.isfinite(both).all()


def test_conversations_survive_the_file(conversations: list[answers.Answered], tmp_path: Path):
    answers.save(tmp_path / "work/answers.safetensors", conversations)
    assert answers.read(tmp_path / "work/answers.safetensors") == conversations
    with pytest.raises(FileNotFoundError, match=r"recipes\.mini\.draft\.answers"):
        answers.read(tmp_path / "none")


def test_packed_rows_learn_the_answers(conversations: list[answers.Answered]):
    batch = answers.packed(conversations, 128)
    wanted = sorted(a.ids[first : last + 1] for a in conversations for first, last in a.answers)
    after = batch.ids.roll(-1, 1)
    found = [after[r][batch.learn[r] & (batch.docs[r] == d)].tolist()
             for r in range(len(batch.ids)) for d in range(int(batch.docs[r].max()) + 1)]  # fmt: skip
    assert sorted(found) == wanted


def test_the_target_answers_with_the_noise_of_seed_and_position(target: Mini):
    model = generate.Model(target, None, "", [2])  # type: ignore[arg-type] - ids need no tokenizer
    prompts = [[5, 6, 7], [9], [5, 6, 7]]
    greedy, drawn, again = answers.answer(model, prompts, [None, 4, 4], 6)
    assert greedy == answers.answer(model, prompts[:1], [None], 6)[0] != again
    ids = prompts[1] + drawn
    hidden = target(torch.tensor([ids]), torch.ones(len(ids), len(ids)).tril().bool(), torch.arange(len(ids))[None])
    logits = target.logits(hidden[0, : len(drawn)])
    assert (logits + answers.gumbel([(4, i + 1) for i in range(len(drawn))], CONFIG.vocab)).argmax(-1).tolist() == drawn


# --- heads ---


def plain_drafts(head: Head, target: Mini, ids: list[int], anchor: int, steps: int) -> list[Tensor]:
    """The drafts from one anchor, each step from the whole list of rows before it: the contract of `unroll`."""
    size, block = anchor + 1, head.block
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    rows = target.layer_rows(torch.tensor([ids[:size]]), mask, torch.arange(size)[None])
    hidden, found = head.start(rows)[0], []
    for step in range(steps):
        embedded = target.embed[torch.tensor(ids[1 : size + step + 1])]
        x, a = head.enter(embedded, hidden)
        q, k, v = block.heads(a[None], *rope_tables(head.config, torch.arange(len(a))[None]))
        k, v = head.grouped(k), head.grouped(v)
        weights = (q[:, :, -1:] @ k.transpose(-1, -2) * CONFIG.head_dim**-0.5).softmax(-1)
        y = x[-1] + (weights @ v).flatten() @ block.out.T
        y = y + block.mlp(norm(y, block.mlp_norm, CONFIG.eps))
        found.append(y)
        hidden = torch.cat([hidden, y[None]])
    return found


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_later_drafts_read_what_the_earlier_ones_computed(kind: str, target: Mini):
    head = drafter(kind, target)
    assert isinstance(head, Head)
    shaken(head)
    ids = torch.randint(CONFIG.vocab, (2, 20), generator=torch.Generator().manual_seed(2))
    batch = data.Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    batch.docs[1, 8:] = 1  # another conversation in the same row
    rows = unroll.target_rows(target, batch)
    anchors = torch.tensor([[4, 11], [3, 12]])
    with torch.no_grad():
        found = list(head.unroll(target.embed, ids, batch.docs, rows, anchors, 3))
        for r, a, text in ((0, 0, ids[0]), (0, 1, ids[0]), (1, 0, ids[1])):
            for step, row in enumerate(plain_drafts(head, target, text.tolist(), int(anchors[r, a]), 3)):
                torch.testing.assert_close(found[step][r, a], row, atol=1e-4, rtol=1e-4)
        alone = plain_drafts(head, target, ids[1, 8:].tolist(), 4, 3)  # positions from another origin: the same
        torch.testing.assert_close(found[2][1, 1], alone[2], atol=1e-4, rtol=1e-4)


def test_drafts_are_judged_by_the_target_at_their_own_position(target: Mini):
    ids = torch.randint(CONFIG.vocab, (1, 12), generator=torch.Generator().manual_seed(2))
    learn = torch.zeros_like(ids, dtype=torch.bool)
    learn[0, 4:9] = True
    batch = data.Batch(ids, torch.zeros_like(ids), learn)
    head = drafter("mtp", target)
    found = list(unroll.drafts(head, target.embed, unroll.said(target, batch, unroll.target_rows(target, batch)), 3))
    for step, draft in enumerate(found):
        assert draft.anchor.tolist() == list(range(4, 9 - step))
        assert draft.at.tolist() == list(range(step, 5))  # the number among the learned positions


# --- folders ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_survives_its_folder(kind: str, target: Mini, tmp_path: Path):
    made = drafter(kind, target)
    if isinstance(made, Head):
        shaken(made)
    size = folders.write(made, tmp_path / kind, eval.FOLDER)
    assert size == sum(f.stat().st_size for f in (tmp_path / kind).iterdir())
    again = train.made(kind, train.arguments().parse_args([kind, "--further", "--work", str(tmp_path)]), target, [])
    assert type(again) is type(made) and all(p.requires_grad for p in again.parameters())
    assert not any(p.requires_grad for p in target.parameters())
    for (name, a), b in zip(made.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name


def test_an_eagle3_folder_has_specforges_layout(target: Mini, tmp_path: Path):
    folders.write(drafter("eagle3", target), tmp_path / "eagle3", eval.FOLDER)
    tensors = load_file(tmp_path / "eagle3/model.safetensors")
    width, attention = CONFIG.hidden, "midlayer.self_attn."
    shapes = {
        "fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (len(VOCAB), width),
        attention + "q_proj.weight": (64, 2 * width), attention + "k_proj.weight": (32, 2 * width),
        attention + "v_proj.weight": (32, 2 * width), attention + "o_proj.weight": (width, 64),
        "midlayer.mlp.gate_proj.weight": (48, width), "midlayer.mlp.up_proj.weight": (48, width),
        "midlayer.mlp.down_proj.weight": (width, 48), "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,), "midlayer.post_attention_layernorm.weight": (width,),
        "d2t": (len(VOCAB),), "t2d": (CONFIG.vocab,),
    }  # fmt: skip
    assert {n: tuple(t.shape) for n, t in tensors.items()} == shapes
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(len(VOCAB))).tolist() == VOCAB.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == VOCAB.tolist()
    config = json.loads((tmp_path / "eagle3/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == len(VOCAB) and config["vocab_size"] == CONFIG.vocab
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


def test_an_mtp_folder_is_the_target_and_one_layer_more(target: Mini, tmp_path: Path):
    folders.write(drafter("mtp", target), tmp_path / "mtp", eval.FOLDER)
    tensors, layer = load_file(tmp_path / "mtp/model.safetensors"), f"model.layers.{CONFIG.layers}."
    assert all(torch.equal(tensors[n], t) for n, t in to_hf(target).items())
    own = {n.removeprefix(layer) for n in tensors.keys() - to_hf(target).keys()}
    joins = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    ordinary = {n.removeprefix("model.layers.0.") for n in tensors if n.startswith("model.layers.0.")}
    assert own == joins | ordinary
    assert tensors[layer + "eh_proj.weight"].shape == (CONFIG.hidden, 2 * CONFIG.hidden)
    config = json.loads((tmp_path / "mtp/config.json").read_text())
    assert config == CONFIG.to_hf() | {"num_nextn_predict_layers": 1}


@torch.inference_mode()
def kvasirs_logits(kind: str, folder: Path, ids: list[int], taps: Tensor) -> Tensor:
    """Kvasir's logits from the target's rows `taps` [n, X], then from each row that it carries."""
    if kind == "mtp":
        loaded = load_model(find_model(str(folder / "mtp")), "float32", options=LoadOptions(mtp=True))
        assert loaded.mtp is not None
        head, cached = MultiTokenDraft(loaded.model, loaded.mtp), loaded.mtp
    else:
        model = load_model(find_model(str(folder / "target")), "float32").model
        head = cached = load_head(find_model(str(folder / "eagle3")), model, "float32").model
    cache, blocks, found = make_cache(cached), np.arange(1, 9, dtype=np.int32), []
    rows, start = head.join(taps), 0
    while start < len(ids) - 1:
        part = ids[start + 1 :][: len(rows)]  # each row's next id
        batch = batch_of([piece(cache, part, start, blocks)], cache)
        padded = torch.zeros(len(batch.tokens_T), rows.shape[1])
        padded[: len(rows)] = rows
        normed, carried = head.forward(batch.tokens_T, padded, batch)
        found.append(head.logits(normed[len(part) - 1 : len(part)]))
        rows, start = carried[len(part) - 1 : len(part)], start + len(part)
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_kvasir_reads_a_head_as_the_recipe_means_it(kind: str, target: Mini, tmp_path: Path):
    folders.write(target, tmp_path / "target", eval.FOLDER)
    made = drafter(kind, target)
    assert isinstance(made, Head)
    folders.write(shaken(made), tmp_path / kind, eval.FOLDER)
    rounded = folders.read(tmp_path / "target", target)
    assert isinstance(rounded, Mini)
    head = folders.read(tmp_path / kind, rounded)
    assert isinstance(head, Head)
    ids = torch.randint(CONFIG.vocab, (1, 12), generator=torch.Generator().manual_seed(2))
    batch = data.Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        rows = unroll.target_rows(rounded, batch)
        anchor = torch.tensor([[8]])
        found = [head.logits(x)[0] for x in head.unroll(rounded.embed, ids, batch.docs, rows, anchor, 3)]
        taps = rounded.finish(rows[-1]) if kind == "mtp" else torch.cat([rows[i] for i in head.aux], -1)
    theirs = kvasirs_logits(kind, tmp_path, ids[0].tolist(), taps[0, :9])
    torch.testing.assert_close(theirs, torch.cat(found), atol=2e-3, rtol=2e-3)


# --- training ---


def options(kind: str, work: Path, steps: int) -> Namespace:
    args = train.arguments().parse_args([kind, "--steps", str(steps), "--draft-vocab", "512"])
    args.work, args.width, args.layers, args.heads = work, 32, 1, 2
    return args


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_lower_the_loss_and_are_the_same_again(
    kind: str, target: Mini, conversations: list[answers.Answered], monkeypatch
):
    monkeypatch.setattr(train, "WARMUP", 1)
    batch = answers.packed(conversations, 128)
    args = options(kind, Path(), 3)

    def run() -> tuple[float, float, list[Tensor]]:
        made = train.made(kind, args, target, conversations)
        reader = train.Reader(target, batch)
        all_said = reader.read([0, 1, 2])
        before = train.loss_of(made, target, all_said, 3)[0].item()
        train.fit(made, reader, args)
        return before, train.loss_of(made, target, all_said, 3)[0].item(), list(made.parameters())

    before, after, first = run()
    assert after < before
    assert all(torch.equal(a, b) for a, b in zip(first, run()[2], strict=True))


def test_what_is_kept_of_the_target_is_what_it_computes(target: Mini, conversations: list[answers.Answered]):
    reader = train.Reader(target, answers.packed(conversations, 128))
    fresh, kept = reader.read([2, 0]), reader.read([0, 2])
    assert len(fresh.rows) == CONFIG.layers
    torch.testing.assert_close(fresh.rows[2][0], kept.rows[2][1])
    assert torch.equal(fresh.batch.ids[1], kept.batch.ids[0])


def test_the_draft_vocabulary_is_what_answers_use_most(conversations: list[answers.Answered]):
    found = train.frequent(conversations, 8, CONFIG.vocab).tolist()
    said = [i for a in conversations for first, last in a.answers for i in a.ids[first : last + 1]]
    assert found == sorted(found) and 2 in found  # the end of each answer
    assert min(map(said.count, found)) >= max(said.count(i) for i in set(said) - set(found)) > 0


def test_muons_update_is_nearly_orthogonal():
    update = orthogonal(torch.randn(40, 24, generator=torch.Generator().manual_seed(1)))
    values = torch.linalg.svdvals(update)
    assert update.shape == (40, 24) and values.min() > 0.5 and values.max() < 1.4


# --- acceptance ---


def held(target: Mini, drawn: bool) -> evaluate.Held:
    model = generate.Model(target, None, "", [2])  # type: ignore[arg-type] - ids need no tokenizer
    prompts = [[5, 6, 7], [9, 4, 3]]
    new = answers.answer(model, prompts, [11, 12] if drawn else [None, None], 9)
    ids = torch.tensor([p + n for p, n in zip(prompts, new, strict=True)])
    learn = torch.zeros_like(ids, dtype=torch.bool)
    learn[:, 2:-1] = True
    return evaluate.Held(data.Batch(ids, torch.zeros_like(ids), learn), [11, 12] if drawn else None)


@pytest.mark.parametrize("drawn", [False, True])
def test_the_target_accepts_its_own_drafts(drawn: bool, target: Mini):
    batch = held(target, drawn)
    counts = evaluate.count(evaluate.matches(target, target, batch), batch.batch.learn)
    assert counts.rates() == [1.0] * 5
    assert counts.speeds() == [2.0, 8 / 3, 4.0, 4.0, 4.0]  # the last 8 ids of 9
    if drawn:
        other = evaluate.Held(batch.batch, [13, 12])
        assert evaluate.count(evaluate.matches(target, target, other), batch.batch.learn).rates()[0] < 1.0


def test_acceptance_counts_runs_of_right_drafts():
    right = torch.zeros(5, 1, 12, dtype=torch.bool)
    right[0, 0, [3, 4, 6]] = right[1, 0, [3, 4]] = True
    right[2, 0, 4] = True
    learn = torch.zeros(1, 12, dtype=torch.bool)
    learn[0, 2:8] = True  # ids 3 to 8, of which the prompt's step samples the first
    counts = evaluate.count(right, learn)
    assert counts.reached == [5, 3, 2, 1, 0] and counts.accepted == [3, 2, 1, 0, 0]
    assert counts.ids == [5] * 5
    assert counts.steps == [3, 2, 2, 2, 2]  # k=1: from 3 to 5, 7, 8; k=2: from 3 to 6, 8


@pytest.mark.parametrize("main", [answers.main, train.arguments().print_help, evaluate.main])
def test_help_shows_an_example(main: Callable[[], None], monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--help"])
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 0
    assert "python -m recipes.mini.draft." in capsys.readouterr().out
