"""A tokenizer of words, built to order: with or without BOS, with padding on either side, with a chat template."""

from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import families

PAD, BOS, EOS, UNKNOWN = range(4)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<turn>", "<end>"]
WORDS = "the cat sat on a mat user assistant system hello world one two three".split()
TEXTS = ["the cat sat on the mat", "hello", "one two three"]

PLAIN_CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
OPEN_CHAT = PLAIN_CHAT + "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
BOS_CHAT = "{{ '<bos> ' }}" + OPEN_CHAT
TURN_CHAT = (
    "{% for m in messages %}{{ '<bos> ' + m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos> assistant ' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """The ids of the words of `text`, special tokens written out."""
    return [_VOCABULARY[word] for word in text.split()]


def words(*, adds: str = "", bos: str | None = "<bos>", pad: str | None = "<pad>", **options: Any):
    """A tokenizer; `adds` is what its own post-processor puts around a text, e.g. ``"<bos> $A"``."""
    core = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    if adds:
        around = [(name, _VOCABULARY[name]) for name in adds.split() if name in SPECIAL]
        core.post_processor = processors.TemplateProcessing(single=adds, pair="$A $B", special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token=pad,
        extra_special_tokens=["<turn>", "<end>"],
        **options,
    )


_VOCABULARY = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
_VOCABULARY |= {f"w{i}": i for i in range(len(_VOCABULARY), families.VOCABULARY)}
