"""The words of a pattern: what is one dim, for specs, rules and rearrangements alike.

    words("(dp b) [s] c*")      ->  ((dp, b), [s], c*)

A word is a dim; words in parentheses are one dim as a product of factors, major first. Brackets are around one word, a
factor that must be whole; `c*` stands for any number of dims. What a word may be otherwise (a size, `@host`, `d~`) is
said by who reads it.
"""

from __future__ import annotations

import re
from functools import lru_cache

import attrs

from colofunc.errors import SpecError

_TOKEN = re.compile(r"\(|\)|\[|\]|\.\.\.|[^\s()\[\]]+")


@attrs.frozen
class Word:
    """One word: its text without brackets and star, and whether it has them."""

    text: str
    whole: bool = False
    many: bool = False

    def __str__(self) -> str:
        text = f"{self.text}*" if self.many else self.text
        return f"[{text}]" if self.whole else text


Dims = tuple[Word | tuple[Word, ...], ...]


@lru_cache(maxsize=1 << 14)
def words(text: str, what: str = "") -> Dims:
    """The dims of a text: a word, or the words of a group in parentheses.

    Raises SpecError where parentheses or brackets do not match, with a note that names the text where `what` says what
    it is ("the rule").
    """
    try:
        return _words(text)
    except SpecError as error:
        if what:
            error.add_note(f"in {what} {text!r}")
        raise


def factors_of(text: str) -> list[list[str]]:
    """Per dim of one side of a rearrangement its factors; sizes of 1 are none."""
    dims = []
    for dim in words(text, "the pattern"):
        group = dim if isinstance(dim, tuple) else (dim,)
        dims.append([word.text for word in group if word.text != "1"])
    return dims


def _words(text: str) -> Dims:
    dims: list[Word | tuple[Word, ...]] = []
    group: list[Word] | None = None
    tokens = iter(_TOKEN.findall(text))
    for token in tokens:
        if token == "(":
            if group is not None:
                raise SpecError("a group inside a group; write the factors of one dim in one pair of parentheses")
            group = []
        elif token == ")":
            if group is None:
                raise SpecError("unbalanced parentheses: ')' without '('; write a dim of two factors as '(a b)'")
            dims.append(tuple(group))
            group = None
        else:
            word = _in_brackets([next(tokens, ""), next(tokens, "")]) if token == "[" else _word(token)
            if group is None:
                dims.append(word)
            else:
                group.append(word)
    if group is not None:
        raise SpecError("unbalanced parentheses: '(' is never closed; write a dim of two factors as '(a b)'")
    return tuple(dims)


def _in_brackets(tokens: list[str]) -> Word:
    """The word between brackets, by what follows the first of them."""
    inside, closing = tokens
    if closing != "]" or inside in ("", "(", ")", "[", "]"):
        raise SpecError("unbalanced brackets: '[' is not closed behind one factor; write whole factors as '[a] [b]'")
    return _word(inside, whole=True)


def _word(token: str, whole: bool = False) -> Word:
    if token == "]":
        raise SpecError("unbalanced brackets: ']' without '['; write a whole factor as '[a]'")
    many = len(token) > 1 and token.endswith("*")
    return Word(token.removesuffix("*") if many else token, whole, many)
