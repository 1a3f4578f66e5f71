"""From what a user calls a prompt to token ids: text, chat messages or ids, one or many, of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from locant.errors import PromptError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Tensor
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """Prompts as the model reads them.

    Attributes:
        tokens: the ids of each prompt, special tokens included, padding never.
    """

    tokens: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(ids) for ids in self.tokens)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """``input_ids`` ``[batch, pos]`` padded on the right, and a mask made from the lengths if any differ.

        The padding id is the prompt's own last id: always in the vocabulary, and never compared with.
        """
        rows = [[*ids, *(ids[-1:] * (self.longest - len(ids)))] for ids in self.tokens]
        inputs = {"input_ids": torch.tensor(rows, device=device)}
        if self.ragged:
            inputs["attention_mask"] = self.mask(device).long()
        return inputs

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """``[batch, pos]``, true at a prompt's own tokens."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(self.longest, device=device) < lengths[:, None]


@dataclass(frozen=True)
class Encoder:
    """Turns prompts into a batch for one model.

    Attributes:
        vocabulary: how many ids the embedding has a row for, now.
        context: the most tokens a prompt may have, where the model states it.
        pivot: a length that the prompts of one batch may not lie on both sides of, since the longest decides how
            all are rotated.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocabulary: Callable[[], int]
    context: int | None
    pivot: int | None = None

    def batch(self, prompts: Prompts, prepend_bos: bool = True) -> Batch:
        """The token ids of one prompt or of many.

        Text gets the tokenizer's own special tokens, and its BOS in front where it has one and did not add
        it, unless `prepend_bos` is false; it never gets two. Chat messages are rendered by the chat template,
        open for an answer unless the last message is the assistant's. Ids are taken as they are; of a tokenizer's
        encoding (``tokenizer(texts, padding=True)``) those that its mask keeps.

        Raises:
            PromptError: nothing to run, something that is no prompt, text without a tokenizer, ids outside the
                vocabulary, or a prompt longer than the model's context.
        """
        each = [self._ids(p, i, prepend_bos) for i, p in enumerate(_separate(prompts))]
        if not each:
            raise PromptError("no prompts: the list is empty", instead="pass at least one prompt")
        vocabulary = self.vocabulary()
        for i, ids in enumerate(each):
            self._check(ids, i, vocabulary)
        self._check_together(each)
        return Batch(tuple(each))

    def strings(self, ids: Sequence[int]) -> list[str]:
        """One string per id, as many as there are ids."""
        tokenizer, known = self._needed("token strings"), self._strings
        for i in set(ids) - known.keys():
            known[i] = str(tokenizer.decode([i]))
        return [known[i] for i in ids]

    @cached_property
    def _strings(self) -> dict[int, str]:
        """Ids that were decoded before; decoding one costs more than everything else a short capture does."""
        return {}

    def _ids(self, prompt: Any, index: int, prepend_bos: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._text(prompt, prepend_bos)
        if _is_chat(prompt):
            return self._chat(prompt)
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise _no_prompt(f"prompt {index} is {prompt!r}, a {type(prompt).__name__}")
        ids = [i.item() if hasattr(i, "item") and getattr(i, "ndim", 1) == 0 else i for i in ids]
        wrong = [x for x in ids if not isinstance(x, int) or isinstance(x, bool)]
        if wrong:
            raise _no_prompt(f"prompt {index} holds {wrong[0]!r}, a {type(wrong[0]).__name__}")
        return tuple(ids)

    def _text(self, text: str, prepend_bos: bool) -> tuple[int, ...]:
        tokenizer = self._needed(f"the text {text[:40]!r}")
        encoded: Any = tokenizer(text)["input_ids"]
        ids = [int(i) for i in encoded]
        bos: Any = tokenizer.bos_token_id
        if bos is None:
            return tuple(ids)
        if ids[:2] == [bos, bos]:
            return tuple(ids[1:])
        if not prepend_bos:
            return tuple(ids[1:] if ids[:1] == [bos] and not text.startswith(str(tokenizer.bos_token)) else ids)
        return tuple(ids if ids[:1] == [bos] or self._bos_marks_turns else [bos, *ids])

    @cached_property
    def _bos_marks_turns(self) -> bool:
        """The chat template opens every turn with it, so before plain text it would open a turn."""
        tokenizer = self._needed("a chat template")
        if not tokenizer.chat_template:
            return False
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids = self._render(turns, answer=False)
        return ids.count(int(tokenizer.bos_token_id)) > 1  # type: ignore[arg-type]

    def _chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        tokenizer = self._needed("chat messages")
        if not tokenizer.chat_template:
            raise PromptError(
                "chat messages for a tokenizer without a chat template",
                instead="pass the conversation as text, or set tokenizer.chat_template",
            )
        return tuple(self._render(messages, answer=messages[-1].get("role") != "assistant"))

    def _render(self, messages: Sequence[Message], answer: bool) -> list[int]:
        tokenizer = self._needed("chat messages")
        rendered = tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=answer, tokenize=True, return_dict=False
        )
        return [int(i) for i in rendered]  # type: ignore[union-attr]

    def _needed(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise PromptError(
                f"{what} cannot be tokenized",
                has="this model was loaded without a tokenizer",
                instead="pass token ids, or load_model(..., tokenizer=...)",
            )
        return self.tokenizer

    def _check_together(self, each: Sequence[Sequence[int]]) -> None:
        sides = {len(ids) > self.pivot for ids in each} if self.pivot is not None else set()
        if len(sides) > 1:
            raise PromptError(
                f"prompts of up to {self.pivot} tokens together with longer ones",
                has="this model rotates every prompt of a batch by the longest one's factors",
                instead="capture the short and the long prompts in two calls",
            )

    def _check(self, ids: Sequence[int], index: int, vocabulary: int) -> None:
        if not ids:
            raise PromptError(f"prompt {index} is empty: it has no tokens", instead="pass at least one token")
        outside = next((i for i in ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            raise PromptError(
                f"prompt {index} holds token id {outside}",
                has=f"the vocabulary has ids 0 to {vocabulary - 1}",
                instead="check that these ids come from this model's tokenizer",
            )
        if self.context is not None and len(ids) > self.context:
            raise PromptError(
                f"prompt {index} has {len(ids)} tokens",
                has=f"the model's context is {self.context} tokens",
                instead="shorten the prompt or split it",
            )


def _is_chat(prompt: Any) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def _separate(prompts: Any) -> list[Any]:
    """One item per prompt."""
    if isinstance(prompts, Tensor):
        if prompts.is_floating_point() or prompts.dtype is torch.bool or prompts.dim() not in (1, 2):
            raise PromptError(
                f"a tensor of {prompts.dtype} with shape {tuple(prompts.shape)} is no prompt",
                instead="pass integer token ids, [pos] for one prompt or [batch, pos] for several",
            )
        return [prompts] if prompts.dim() == 1 else list(prompts)
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _unpadded(prompts)
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not (isinstance(prompts, Sequence) or hasattr(prompts, "tolist")):
        raise _no_prompt(f"a {type(prompts).__name__} is no prompt")
    items: list[Any] = list(getattr(prompts, "tolist", lambda: prompts)())
    numbers = [isinstance(x, (int, float)) or getattr(x, "ndim", None) == 0 for x in items]
    return [items] if items and all(numbers) else items


def _unpadded(encoded: Mapping[str, Any]) -> list[Any]:
    """The ids of a tokenizer's encoding that its mask keeps, whichever side it padded."""
    ids = _separate(encoded["input_ids"])
    if "attention_mask" not in encoded:
        return ids
    masks = _separate(encoded["attention_mask"])
    if [len(m) for m in masks] != [len(row) for row in ids]:
        raise PromptError("input_ids and attention_mask of different shapes", instead="pass the tokenizer's own pair")
    return [[int(i) for i, kept in zip(row, mask, strict=True) if kept] for row, mask in zip(ids, masks, strict=True)]


def _no_prompt(asked: str) -> PromptError:
    return PromptError(
        asked,
        has="a prompt is text, a list of token ids, a tokenizer's encoding, or a list of chat messages",
        instead="pass one of these, or a list of them",
    )
