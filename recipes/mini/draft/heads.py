"""One decoder layer that drafts from the target's hidden rows: EAGLE-3 and multi-token prediction.

Both read, at row i, hidden states of the target's row i and the embedding of token i + 1, and predict token i + 2. The
layer's output, before the last norm, is the hidden state of their next draft, one token on (EAGLE-3, arXiv:2503.01840;
DeepSeek-V3, arXiv:2412.19437, section 2.2).

Shape letters: as in `model.py`; A anchors of a row, the rows where drafting begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import Block, Mini, MiniConfig, norm, rope_tables

UNSURE = 0.2  # of the target's final norm: a head begins with nearly equal logits, since what passes is another token's


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head besides the target's. aux: the target's layers whose outputs it reads, from 0."""

    ffn: int = 512
    draft_vocab: int = 1024
    aux: tuple[int, int, int] = (0, 1, 3)


class Head(nn.Module):
    """The parts both kinds share. `aux` are the target's layers whose outputs it reads."""

    aux: tuple[int, ...]

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        self.block = Block(config)
        self.last_norm = nn.Parameter(torch.ones(config.hidden))

    def start(self, rows: list[Tensor]) -> Tensor:
        """The hidden states [B, S, D] of the first draft from the outputs of all layers of the target."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and the input of attention from the embedded token and the hidden state, [..., D]."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Logits over the draft vocabulary from the layer's output."""
        raise NotImplementedError

    @property
    def vocab(self) -> Tensor:
        """int64: the target's id of each id of the draft vocabulary."""
        raise NotImplementedError

    def unroll(self, embed: Tensor, ids: Tensor, docs: Tensor, rows: list[Tensor], anchors: Tensor, steps: int) -> Iterator[Tensor]:  # fmt: skip
        """The layer's outputs [B, A, D] of each draft from anchors [B, A], with the ids drafted before it right.

        As when drafting, the first draft sees the target's hidden states up to its anchor, a later one also what the
        drafts before it computed themselves (training-time test).
        """
        c, size = self.config, ids.shape[1]
        x, a = self.enter(F.embedding(ids.roll(-1, 1), embed), self.start(rows))
        q, k, v = self.block.heads(a, *rope_tables(c, torch.arange(size)[None]))
        x, q = take(x, anchors), q.gather(2, anchors[:, None, :, None].expand(-1, c.heads, -1, c.head_dim))
        mask = (docs[:, None] == docs.gather(1, anchors)[..., None]) & (torch.arange(size) <= anchors[..., None])
        k, v = self.grouped(k), self.grouped(v)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            if step:
                at = (anchors + 1 + step).clamp(max=size - 1)
                x, a = self.enter(F.embedding(ids.gather(1, at), embed), x)
                q, own_k, own_v = self.block.heads(a, *rope_tables(c, anchors + step))
                own.append((self.grouped(own_k), self.grouped(own_v)))
            x = x + F.linear(attend(q, k, v, mask[:, None], own).transpose(1, 2).flatten(2), self.block.out)
            x = x + self.block.mlp(norm(x, self.block.mlp_norm, c.eps))
            yield x

    def grouped(self, t: Tensor) -> Tensor:
        """Keys or values [B, K, S, d], repeated for each query head."""
        return t.repeat_interleave(self.config.heads // self.config.kv_heads, 1)


class Eagle3(Head):
    """EAGLE-3 in the layout of SpecForge: attention reads the embedding beside the hidden state."""

    def __init__(self, target: MiniConfig, head: HeadConfig, vocab: Tensor) -> None:
        super().__init__(replace(target, ffn=head.ffn, layers=1))
        c = self.config
        self.aux, self.target_vocab = head.aux, target.vocab
        self.register_buffer("draft_ids", vocab)
        self.fc = nn.Parameter(torch.empty(c.hidden, len(self.aux) * target.hidden))
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden))
        self.block.qkv = nn.Parameter(torch.empty(sum(self.block.sizes), 2 * c.hidden))
        self.lm_head = nn.Parameter(torch.empty(len(vocab), c.hidden))

    @torch.no_grad()
    def init(self, target: Mini, seed: int) -> "Eagle3":
        """Random matrices; logits as the target's, and a hidden state that begins as the last of the layers' outputs."""
        random_(self.block, seed)
        self.fc.normal_(0.0, 0.01, generator=torch.Generator().manual_seed(seed))
        self.fc[:, -self.config.hidden :] += torch.eye(self.config.hidden)
        self.lm_head.copy_(target.embed[self.vocab])
        self.last_norm.copy_(target.final_norm * UNSURE)
        return self

    @property
    def vocab(self) -> Tensor:
        return self.get_buffer("draft_ids")

    def start(self, rows: list[Tensor]) -> Tensor:
        return F.linear(torch.cat([rows[i] for i in self.aux], -1), self.fc)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config.eps
        return hidden, torch.cat([norm(embedded, self.block.attn_norm, eps), norm(hidden, self.hidden_norm, eps)], -1)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(norm(x, self.last_norm, self.config.eps), self.lm_head)


class Mtp(Head):
    """DeepSeek's form: the embedding and the hidden state are joined before an ordinary layer of the target's shape.

    As in vLLM, SGLang and Kvasir, the first hidden state has been through the target's final norm, later ones are the
    layer's output as it is; the head's norm of its hidden input makes them alike. The logits' table is the target's.
    """

    def __init__(self, target: Mini) -> None:
        super().__init__(replace(target.config, layers=1))
        c = self.config
        self.aux = (target.config.layers - 1,)
        self.shared = [target]  # in a list, so that its weights are no parameters of this module
        self.enorm = nn.Parameter(torch.ones(c.hidden))
        self.hnorm = nn.Parameter(torch.ones(c.hidden))
        self.eh_proj = nn.Parameter(torch.empty(c.hidden, 2 * c.hidden))

    @torch.no_grad()
    def init(self, seed: int) -> "Mtp":
        """Random matrices; the hidden state passes at first."""
        random_(self.block, seed)
        self.eh_proj.normal_(0.0, 0.01, generator=torch.Generator().manual_seed(seed))
        self.eh_proj[:, self.config.hidden :] += torch.eye(self.config.hidden)
        self.last_norm.copy_(self.shared[0].final_norm * UNSURE)
        return self

    @property
    def vocab(self) -> Tensor:
        return torch.arange(self.config.vocab)

    def start(self, rows: list[Tensor]) -> Tensor:
        return self.shared[0].finish(rows[-1])

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config.eps
        joined = torch.cat([norm(embedded, self.enorm, eps), norm(hidden, self.hnorm, eps)], -1)
        x = F.linear(joined, self.eh_proj)
        return x, norm(x, self.block.attn_norm, eps)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(norm(x, self.last_norm, self.config.eps), self.shared[0].embed)


@torch.no_grad()
def random_(block: Block, seed: int) -> None:
    """Normal weights of 0.04; projections back into the residual stream are half as large."""
    rng = torch.Generator().manual_seed(seed)
    for name, p in block.named_parameters():
        if p.dim() == 2:
            p.normal_(0.0, 0.02 if name in ("out", "down") else 0.04, generator=rng)


def take(x: Tensor, at: Tensor) -> Tensor:
    """[B, A, D]: rows `at` [B, A] of x [B, S, D]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Queries [B, H, A, d] over keys [B, H, S, d] under a mask [B, 1, A, S], and over an anchor's own later keys."""
    q = q * q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    weights = torch.cat([scores, *((q * own_k).sum(-1, keepdim=True) for own_k, _ in own)], -1).softmax(-1)
    size = k.shape[2]
    out = weights[..., :size] @ v
    for i, (_, own_v) in enumerate(own):
        out = out + weights[..., size + i, None] * own_v
    return out
