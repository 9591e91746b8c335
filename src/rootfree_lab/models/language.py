"""Language models: tokens (n, context) in, scores of the next token (n, context, classes) out."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.data import Dataset


class LSTMLanguageModel(nn.Module):
    """The 3-layer LSTM of Merity et al. (2018): 24.2 million parameters on Penn Treebank.

    Embedding, stacked LSTMs, linear decoder; the state starts at zero in each sequence. With `tied`
    the decoder's weight is the embedding's, and the last LSTM is as wide as it.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        embedding: int = 400,
        hidden: int = 1150,
        layers: int = 3,
        dropout: float = 0.4,
        tied: bool = True,
    ) -> None:
        super().__init__()
        vocabulary = data.classes
        sizes = [embedding, *[hidden] * (layers - 1), embedding if tied else hidden]
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(sizes[-1], vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        scores: Tensor = self.decoder(x)
        return scores


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions on the last axis of x: (n, heads, context, d), in float32."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class GPTBlock(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm and around a skip."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        heads = (n, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        rate = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            _rotate(q), _rotate(k), v, dropout_p=rate, is_causal=True
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(n, length, width)))
        added: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x + added


class GPT(nn.Module):
    """A small GPT with rotary positions: any context length, 10.8 million parameters on bytes."""

    def __init__(
        self, data: Dataset, *, width: int = 384, depth: int = 6, heads: int = 6,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(f"width must be a multiple of 2·heads = {2 * heads}, got {width}")
        self.embedding = nn.Embedding(data.classes, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, data.classes, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for name, p in self.named_parameters():
            # Each block adds two terms to the stream: keeps its variance the same at any depth.
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(p, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def lstm_micro(data: Dataset, *, hidden: int = 32, dropout: float = 0.0) -> nn.Module:
    """Three layers of 32 units."""
    return LSTMLanguageModel(data, embedding=16, hidden=hidden, dropout=dropout, tied=False)


def gpt_micro(data: Dataset, *, width: int = 32, depth: int = 2, heads: int = 2) -> nn.Module:
    """Two blocks of width 32."""
    return GPT(data, width=width, depth=depth, heads=heads)
