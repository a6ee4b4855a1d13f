"""What a training run is to do: the data it makes, the draft it trains, and how long and how fast it learns."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DataRecipe:
    """The corpus: answers of the target to prompts that the user gives or that it makes up itself.

    sequences: how many texts; held_out: how many of them, the first ones, are never trained on. batch: texts spoken at
    once, and stored together. answer_tokens, user_tokens: the most of an answer, and of words that are made up.
    temperatures: of the answers, taken in turn. features: "cached" stores what the layers put out as bf16 (2 bytes x
    hidden size x (layers + 1) a token), "online" computes it again whenever it is needed.
    """

    sequences: int = 50_000
    held_out: int = 16
    batch: int = 32
    answer_tokens: int = 512
    user_tokens: int = 96
    user_temperature: float = 0.9
    temperatures: tuple[float, ...] = (0.0, 0.7)
    features: Literal["cached", "online"] = "online"
    seed: int = 0


@dataclass(frozen=True)
class DraftRecipe:
    """The net. What is left out is as in the target.

    layers: ids of the target's layers whose outputs it reads; None takes the usual ones, num_features of them for
    block drafts.
    vocabulary: how many of the corpus's most frequent tokens it can guess; None for all of the target's.
    own_head: whether it trains a head of its own instead of using the target's rows.
    block_size: tokens guessed at once, with the root. markov_rank, markov_head, confidence: of DSpark.
    model: of "distill", the directory or Hub id of the small model to begin from.
    """

    num_layers: int = 1
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: tuple[int, ...] | None = None
    num_features: int = 3
    vocabulary: int | None = None
    own_head: bool = False
    block_size: int = 8
    markov_rank: int = 256
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = True
    model: str | None = None


@dataclass(frozen=True)
class TrainRecipe:
    """The learning.

    batch: sequences a step, over all processes. max_tokens: longer sequences are cut. epochs, max_minutes: whichever
    ends first. warmup: share of the steps. decay: of the loss per step ahead: a factor (EAGLE-3, MTP), or the number of
    slots in which the weight falls to 1/e (block drafts). soft: share of the loss that compares with the target's
    distribution instead of with its token. steps_ahead: of the training-time test. anchors: blocks a sequence.
    evaluate_every: steps between measurements of the acceptance length, on evaluate_prompts held-out prompts of
    evaluate_tokens tokens each with trees of evaluate_budget nodes; patience: how many of them in a row may bring no
    new best. checkpoint_every: steps. precision: "auto" is bf16 or fp16 where the device computes faster in it.
    """

    learning_rate: float = 6e-4
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup: float = 0.04
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    epochs: int = 6
    max_minutes: float | None = None
    batch: int = 8
    max_tokens: int = 2048
    steps_ahead: int = 7
    anchors: int = 512
    decay: float = 4.0
    soft: float = 1.0
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    evaluate_every: int = 500
    evaluate_prompts: int = 8
    evaluate_tokens: int = 64
    evaluate_budget: int = 8
    patience: int = 5
    checkpoint_every: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """All of it. target: the model that it is for; None for any."""

    kind: Literal["eagle3", "mtp", "dflash", "dspark", "distill"]
    why: str = ""
    target: str | None = None
    data: DataRecipe = field(default_factory=DataRecipe)
    draft: DraftRecipe = field(default_factory=DraftRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
