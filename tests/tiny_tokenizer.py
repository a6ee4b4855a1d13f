"""A byte-level BPE tokenizer of 320 entries, made on the spot: 8 specials, 256 bytes, 56 merges."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>", "<a>", "<b>"]
_CORPUS = [
    "the cat sat on the mat and the other cat ate that hat",
    "in the end there is nothing better than this",
]
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(specials: list[str] = SPECIALS) -> PreTrainedTokenizerFast:
    """Ids 0-7 are `specials`; any text can be encoded; it has a chat template that begins with one <bos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<a>", "<b>"],
        chat_template=_TEMPLATE,
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words only: but for <bos> and <eos> it has nothing in common with the other."""
    words = {word: number for number, word in enumerate(["<bos>", "<eos>", *(f"word{n}" for n in range(300))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
