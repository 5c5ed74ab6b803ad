"""Changed files: bytes and JSON trees with mistakes, from one seed."""

import json
import random
import zlib
from typing import Any

HARM = "__import__('os').system('touch harm')"
WORDS: list[Any] = [
    None, True, False, 0, -1, 1, 7, 1 << 40, 1 << 70, -(1 << 63), 0.5, -1.0, 1e308, "", "x", "dp", "../../harm", "/tmp/harm", "\0",
    "(dp a) b", "float32", "nn", "*", "[", [], {}, [[]], [0], {"ref": 0}, {"tuple": []}, {"dtype": "nn"}, {"device": "x"}, {"float": "x"},
    HARM, f"x=1) or {HARM}", "aten.from_file.default", "unlimited", "impossible", "é" * 50, [[[[[[]]]]]],
]  # fmt: skip
TOKENS = [
    b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"  ", b"-", b"&a ", b"*a", b"!!python/object/apply:os.system ",
    b"9" * 30, b"NaN", b"1e999", b"null", b"<<: ", b"\\", b"\xed\xa0\x80", b"'", HARM.encode(),
]  # fmt: skip


def mutated_bytes(data: bytes, seed: int) -> bytes:
    """One to three changes of a file's bytes."""
    made = random.Random(seed)
    for _ in range(made.randint(1, 3)):
        at = made.randrange(len(data) + 1)
        size = made.choice([1, 1, 2, 8, 64, len(data)])
        kind = made.choice(["flip", "cut", "end", "insert", "repeat", "swap"])
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << made.randrange(8)]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + size :]
        elif kind == "end":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + made.choice(TOKENS) + data[at:]
        elif kind == "repeat":
            data = data[:at] + data[at : at + min(size, 64)] * 2 + data[at + size :]
        elif kind == "swap":
            data = data[:at] + bytes(made.randrange(256) for _ in range(min(size, 8))) + data[at + size :]
    return data


def mutated_tree(tree: Any, seed: int) -> Any:
    """A JSON tree with one to three values, keys or members changed."""
    made = random.Random(seed)
    tree = json.loads(json.dumps(tree))
    for _ in range(made.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return made.choice(WORDS)
        holder, key = made.choice(places)
        kind = made.choice(["word", "word", "word", "remove", "other", "rename", "repeat"])
        if kind == "remove":
            del holder[key]
        elif kind == "other":
            other, at = made.choice(places)
            holder[key] = json.loads(json.dumps(other[at])) if at in (other if isinstance(other, dict) else range(len(other))) else None
        elif kind == "rename" and isinstance(holder, dict):
            holder[str(made.choice(WORDS))] = holder.pop(key)
        elif kind == "repeat" and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        else:
            holder[key] = json.loads(json.dumps(made.choice(WORDS)))
    return tree


def _places(tree: Any) -> Any:
    """Every (container, key) of a tree."""
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, child in pairs:
        yield tree, key
        yield from _places(child)


def mutated_json(data: bytes, seed: int) -> bytes:
    """A JSON file with changed bytes, or with a changed tree."""
    if seed % 3 == 0:
        return mutated_bytes(data, seed)
    return json.dumps(mutated_tree(json.loads(data), seed)).encode()


def mutated_checked(data: bytes, seed: int, head: str) -> bytes:
    """As `mutated_json`, of a file that begins with the checksum of its content: it is right again, in most cases."""
    key, rest = head.rsplit(' "', 1)[1].rstrip('": '), data
    if seed % 3 == 0:
        return mutated_bytes(rest, seed)
    text = json.dumps(mutated_tree(json.loads(data)[key], seed), separators=(",", ":")).encode()
    return head.encode() % zlib.crc32(text) + text + b"}" + data[len(data.rstrip(b"\n")) :]
