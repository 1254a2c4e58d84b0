"""Checkpoints that were made to break a loader, and what comes of loading them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from infer.models.hub import SHIPPED_FOLDER
from tests.support.hostile_files import LIMIT_BYTES, LIMIT_S, load_all

Change = Callable[[Path], object]


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        replace(folder, "config.json", json.dumps({**raw, **fields}))

    return change


def replace(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def file(name: str, content: str | bytes) -> Change:
    return lambda folder: replace(folder, name, content)


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(raw)
        replace(folder, "tokenizer.json", json.dumps(raw))

    return apply


def gpt2(**fields: Any) -> Change:
    base = {"vocab_size": 100, "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64}
    raw = {"architectures": ["GPT2LMHeadModel"], **base, **fields}
    return file("config.json", json.dumps(raw))


def gemma(**fields: Any) -> Change:
    return config(architectures=["Gemma3ForCausalLM"], **fields)


def index(weight_map: Any) -> Change:
    def change(folder: Path) -> None:
        replace(folder, "model.safetensors.index.json", json.dumps({"weight_map": weight_map}))

    return change


def header(text: bytes, length: int | None = None) -> Change:
    size = struct.pack("<Q", len(text) if length is None else length)
    return file("model.safetensors", size + text)


def in_place_of(name: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _tensors(*parts: tuple[str, str, list[int], list[int]]) -> bytes:
    return json.dumps(
        {n: {"dtype": d, "shape": s, "data_offsets": o} for n, d, s, o in parts}
    ).encode()


DIGITS = "9" * 5000


DEEP = "[" * 100_000 + "]" * 100_000


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}


CONFIGS: dict[str, Change] = {
    "5,000 digits": file("config.json", f'{{"architectures": ["X"], "vocab_size": {DIGITS}}}'),
    "depth 100,000": file("config.json", f'{{"a": {DEEP}}}'),
    "a list": file("config.json", "[]"),
    "not UTF-8": file("config.json", b"\xff\xfe{}"),
    "17 MB": file("config.json", '{"a": "' + "x" * (17 << 20) + '"}'),
    "architectures text": config(architectures="LlamaForCausalLM"),
    "architectures number": config(architectures=[7]),
    "vocab 2^62": config(vocab_size=2**62),
    "vocab 2^63": config(vocab_size=2**63),
    "vocab 2^30": config(vocab_size=2**30),
    "vocab 0": config(vocab_size=0),
    "vocab true": config(vocab_size=True),
    "hidden 1e9": config(hidden_size=10**9),
    "hidden text": config(hidden_size="64"),
    "layers 1e9": config(num_hidden_layers=10**9),
    "layers 1e6": config(num_hidden_layers=10**6),
    "layers 1,000": config(num_hidden_layers=1000),
    "heads 1e9": config(num_attention_heads=10**9),
    "heads > hidden": config(num_attention_heads=100_000, num_key_value_heads=100_000),
    "head size odd": config(head_dim=33),
    "positions 2^62": config(max_position_embeddings=2**62),
    "eps NaN": config(rms_norm_eps=float("nan")),
    "eps infinite": config(rms_norm_eps=float("inf")),
    "eps negative": config(rms_norm_eps=-1.0),
    "theta NaN": config(rope_theta=float("nan"), rope_parameters=None),
    "theta infinite": config(rope_theta=float("inf"), rope_parameters=None),
    "theta 1e400": file(
        "config.json", '{"architectures": ["LlamaForCausalLM"], "rope_theta": 1e400}'
    ),
    "rope list": config(rope_parameters=[1, 2], rope_scaling=[1]),
    "rope text": config(rope_parameters=None, rope_scaling="linear"),
    "rope factor inf": config(rope_parameters={"rope_type": "linear", "factor": float("inf")}),
    "yarn text": config(rope_parameters={**YARN, "attention_factor": "2"}),
    "yarn mscale": config(rope_parameters={**YARN, "mscale": [1], "mscale_all_dim": 1}),
    "yarn NaN": config(rope_parameters={**YARN, "attention_factor": float("nan")}),
    "rope kind list": config(rope_parameters={"rope_type": ["yarn"]}),
    "dtype list": config(dtype=["bfloat16"]),
    "bias number": config(attention_bias=2),
    "gemma pattern 0": gemma(sliding_window_pattern=0),
    "gemma pattern text": gemma(sliding_window_pattern="6"),
    "gemma scalar 0": gemma(query_pre_attn_scalar=0),
    "gemma scalar -1": gemma(query_pre_attn_scalar=-1),
    "gemma softcap NaN": gemma(final_logit_softcapping=float("nan")),
    "gemma ropes": gemma(rope_parameters={"full_attention": [1], "sliding_attention": "x"}),
    "gemma layer types": gemma(layer_types=[["sliding_attention"]]),
    "gemma window 0": gemma(layer_types=["sliding_attention"] * 4, sliding_window=0),
    "gpt2 heads > hidden": gpt2(n_head=128),
    "gpt2 embd 65": gpt2(n_embd=65),
    "gpt2 positions 2^62": gpt2(n_positions=2**62),
    "eos 2^70": file("generation_config.json", json.dumps({"eos_token_id": 2**70})),
    "eos text": file("generation_config.json", json.dumps({"eos_token_id": "2"})),
    "eos digits": file("generation_config.json", f'{{"eos_token_id": {DIGITS}}}'),
    "generation depth": file("generation_config.json", f'{{"a": {DEEP}}}'),
}  # fmt: skip


ONE = ("a", "F32", [2], [0, 8])


WEIGHTS: dict[str, Change] = {
    "index number": index({"a": 5}),
    "index list": index({"a": ["model.safetensors"]}),
    "index object": index({"a": {}}),
    "index null": index({"a": None}),
    "index long name": index({"a": "x" * 5000}),
    "index NUL": index({"a": "x\0y"}),
    "index outside": index({"a": "../config.json"}),
    "index no map": file("model.safetensors.index.json", '{"weight_map": [1]}'),
    "index depth": file("model.safetensors.index.json", f'{{"weight_map": {DEEP}}}'),
    "empty": file("model.safetensors", b""),
    "header 2^63": header(b"{}", 1 << 63),
    "header cut": header(b'{"a":'),
    "header depth": header(DEEP.encode()),
    "header list": header(b"[]"),
    "header quoted in the error": header(json.dumps({"__metadata__": "x" * 10_000}).encode()),
    "overlap": header(_tensors(ONE, ("b", "F32", [2], [4, 12]))),
    "no data": header(_tensors(ONE)),
    "shape 2^40": header(_tensors(("a", "F32", [2**40], [0, 8]))),
    "negative shape": header(_tensors(("a", "F32", [-2], [0, 8]))),
    "names 100,000": header(_tensors(*((f"n{i}", "F32", [0], [0, 0]) for i in range(100_000)))),
    "random": file("model.safetensors", bytes(range(256)) * 64),
    "pickle only": lambda folder: (folder / "model.safetensors").rename(
        folder / "pytorch_model.bin"
    ),
    "none": lambda folder: (folder / "model.safetensors").unlink(),
    "pipe": in_place_of("model.safetensors", os.mkfifo),
    "device": in_place_of("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    # The announced model would take gigabytes, but the file has ten megabytes.
    "claims gigabytes": config(vocab_size=2**20, hidden_size=1024),
}


def _many_tokens(raw: dict[str, Any]) -> None:
    first = len(raw["model"]["vocab"]) + 1000
    raw["added_tokens"] += [
        {
            "id": first + i,
            "content": f"<{'ab' * (i % 7)}{i}>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(100_000)
    ]


def _first_added(**fields: Any) -> Change:
    return tokenizer(lambda raw: raw["added_tokens"][0].update(fields))


def _splits(pattern: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}  # fmt: skip
    sequence = {"type": "Sequence", "pretokenizers": [split, level]}
    return tokenizer(lambda raw: raw.update(pre_tokenizer=sequence))


TEXT: dict[str, Change] = {
    "no JSON": file("tokenizer.json", "{"),
    "depth": file("tokenizer.json", DEEP),
    "deep inside": tokenizer(lambda raw: raw.update(normalizer=json.loads("[" * 900 + "]" * 900))),
    "id -1": _first_added(id=-1),
    "id 2^32": _first_added(id=2**32),
    "id text": _first_added(id="1"),
    "vocab null": tokenizer(lambda raw: raw["model"].update(vocab=None)),
    "vocab ids 2^40": tokenizer(lambda raw: raw["model"].update(vocab={"a": 2**40})),
    "100,000 added": tokenizer(_many_tokens),
    "no decoder": tokenizer(lambda raw: raw.update(decoder={"type": "Odd"})),
    "broken pattern": _splits("(" * 500),
    "pattern without end": _splits(r"(?:a+)+$|(?:\s+)+$|(?:\p{L}+)+\d|(?:.?.?)+!"),
    "pipe": in_place_of("tokenizer_config.json", os.mkfifo),
    "tokenizer pipe": in_place_of("tokenizer.json", os.mkfifo),
    "device": in_place_of("tokenizer_config.json", lambda path: path.symlink_to("/dev/zero")),
    "tokenizer device": in_place_of("tokenizer.json", lambda path: path.symlink_to("/dev/zero")),
    "template device": in_place_of("chat_template.jinja", lambda p: p.symlink_to("/dev/zero")),
    "template pipe": in_place_of("chat_template.jinja", os.mkfifo),
    "folder": in_place_of("tokenizer_config.json", Path.mkdir),
    "config depth": file("tokenizer_config.json", f'{{"a": {DEEP}}}'),
    "config digits": file("tokenizer_config.json", f'{{"a": {DIGITS}}}'),
    "added decoder": file("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
    "added digits": file(
        "tokenizer_config.json", '{"added_tokens_decoder": {"' + DIGITS + '": {}}}'
    ),
    "added fields": file(
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"1": {"content": "<odd>", "lstrip": "yes"}}}',
    ),
    "named list": file("tokenizer_config.json", '{"bos_token": ["<s>"]}'),
    "named surrogate": file("tokenizer_config.json", r'{"bos_token": "\ud800"}'),
    "template number": file("tokenizer_config.json", '{"chat_template": 7}'),
    "template surrogate": file("tokenizer_config.json", r'{"chat_template": "\ud800{{"}'),
}


LEGAL: dict[str, Change] = {
    "no pieces": tokenizer(lambda raw: raw["model"].update(vocab={}, merges=[])),
    "literal of 3,000": _first_added(content="<" + "x" * 3000 + ">"),
    "extra": file("tokenizer_config.json", '{"extra_special_tokens": {"a": [1]}}'),
}


def template(source: str) -> Change:
    return file("chat_template.jinja", source)


HARMLESS = {
    *("filtered loops", "shared dict()", "repeating kept", "rjust", "round"),
    *("architectures text", "index long name", "index NUL"),
}
"""What may be loaded: templates whose work takes little, or fails in the process that renders; a
name in place of a list of one; an index of shards that are not there beside one file of all."""
OVER = "{% for a in range(9999) %}"


TEMPLATES: dict[str, Change] = {
    "loops": template(OVER * 4 + "x" + "{% endfor %}" * 4),
    "silent loops": template(OVER * 4 + "{% endfor %}" * 4),
    "filtered loops": template("{% for a in range(9999) if range(9999)|sum == 1 %}{% endfor %}"),
    "doubling": template("{% set ns = namespace(x='ab') %}{% for a in range(99) %}"
                         "{% set ns.x = ns.x + ns.x %}{% endfor %}"),
    "doubling ~": template("{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60),
    "doubling blocks": template("{% set x = 'ab' %}"
                                + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60),
    "doubling lists": template("{% set x = [1] %}" + "{% set x = x + x %}" * 60),
    "shared lists": template("{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}"),
    "shared compared": template("{% set x = [1] %}{% set y = [1] %}"
                                + "{% set x = [x, x] %}{% set y = [y, y] %}" * 40 + "{{ x == y }}"),
    "shared json": template("{% set x = {'a': 1} %}" + "{% set x = {'a': x, 'b': x} %}" * 60
                            + "{{ x|tojson }}"),
    "shared dict()": template("{% set x = dict(a=1) %}" + "{% set x = dict(a=x, b=x) %}" * 60),
    "repeating": template("{{ 'x' * 999999999 }}"),
    "repeating kept": template("{% set x = 'a' * 9999999 %}" + "{% set b = x ~ 'c' %}" * 50),
    "ljust": template("{{ 'x'.ljust(999999999) }}"),
    "rjust": template("{{ 'x'.rjust(width=999999999) }}"),
    "center": template("{{ 'x'|center(999999999) }}"),
    "zfill": template("{{ '1'.zfill(999999999) }}"),
    "expandtabs": template("{{ '\t'.expandtabs(999999999) }}"),
    "format": template("{{ '{:>999999999}'.format(1) }}"),
    "format nested": template("{{ '{:>{}}'.format(1, 999999999) }}"),
    "format repeated": template("{{ ('{0}' * 9999).format('x' * 99999) }}"),
    "format filter": template("{{ '%999999999d'|format(1) }}"),
    "percent": template("{{ '%999999999d' % 1 }}"),
    "percent star": template("{{ '%*d' % (999999999, 1) }}"),
    "indent": template("{{ 'a\nb'|indent(999999999) }}"),
    "indent text": template("{{ ('a\n' * 9999)|indent('x' * 99999) }}"),
    "batch": template("{{ [1]|batch(999999999, 'x')|list }}"),
    "slice": template("{{ [1]|slice(999999999)|list }}"),
    "tojson": template("{{ [[1]]|tojson(indent=999999999) }}"),
    "round": template("{{ 1|round(999999999) }}"),
    "power": template("{{ 9999 ** 9999 }}"),
    "big integers": template("{% set x = 2 %}" + "{% set x = x * x %}" * 60),
    "replace": template("{{ ('a' * 9999).replace('a', 'b' * 99999) }}"),
    "replace filter": template("{{ ('a' * 9999)|replace('a', 'b' * 99999) }}"),
    "join": template("{{ (['x' * 99999] * 9999)|join }}"),
    "join method": template("{{ ''.join(['x' * 99999] * 9999) }}"),
    "join generator": template("{{ (['x' * 99999] * 9999)|select|join }}"),
    "split": template("{{ ('a ' * 9999999).split() }}"),
    "letters": template("{{ ('a' * 15999999)|list }}"),
    "translate": template("{{ ('a' * 9999).translate({97: 'b' * 99999}) }}"),
    "bytes": template("{{ (5).to_bytes(999999999, 'big') }}"),
    "sum": template("{{ ([[1] * 9999] * 9999)|sum(start=[]) }}"),
    "macros": template("{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}"
                       "{% endmacro %}{{ m(60) }}"),
    "wordwrap": template("{{ ('a ' * 9999)|wordwrap(1, wrapstring='x' * 99999) }}"),
    "strftime": template("{{ strftime_now('%c' * 9999999) }}"),
    "source of 3 MB": template("x" * 3_000_000),
    "nested": template("{% if 1 %}" * 5000 + "{% endif %}" * 5000),
    "brackets": template("{{ " + "(" * 9999 + ")" * 9999 + " }}"),
}  # fmt: skip


def gguf_file(
    fill: Callable[[gguf.GGUFWriter], object], tensor: tuple[int, ...] = (8, 64)
) -> Change:
    def change(folder: Path) -> None:
        import numpy as np

        writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
        fill(writer)
        writer.add_tensor("token_embd.weight", np.zeros(tensor, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return change


def shape(**changes: Any) -> Callable[[gguf.GGUFWriter], None]:
    fields = {"context_length": 64, "embedding_length": 64, "block_count": 1, "head_count": 4,
              "feed_forward_length": 64, "layer_norm_rms_eps": 1e-5}  # fmt: skip

    def fill(writer: gguf.GGUFWriter) -> None:
        for name, value in {**fields, **changes}.items():
            getattr(writer, f"add_{name}")(value)

    return fill


def raw_gguf(*parts: bytes, keys: int = 1, tensors: int = 0) -> Change:
    content = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)
    return lambda folder: replace(folder, "m.gguf", content)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pieces(count: int) -> Callable[[gguf.GGUFWriter], None]:
    def fill(writer: gguf.GGUFWriter) -> None:
        shape()(writer)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *("a" * n for n in range(1, count))])
        writer.add_token_scores([0.0] * (count + 2))
        writer.add_token_types([2, 3, 3] + [1] * (count - 1))

    return fill


ARRAY, UINT8, UINT32, STRING = 9, 0, 4, 8


NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(100_000))


GGUFS: dict[str, Change] = {
    "nested arrays": raw_gguf(text(b"a"), struct.pack("<I", ARRAY), NESTED),
    "array 2^60": raw_gguf(text(b"a"), struct.pack("<IIQ", ARRAY, UINT32, 1 << 60)),
    "long array": raw_gguf(
        text(b"a"), struct.pack("<IIQ", ARRAY, UINT8, 20_000_000), bytes(20_000_000)
    ),
    "string 2^63": raw_gguf(struct.pack("<Q", 1 << 63), b"abc"),
    "keys 2^63": raw_gguf(text(b"a"), struct.pack("<II", UINT32, 1), keys=1 << 63),
    "tensors 2^63": raw_gguf(text(b"a"), struct.pack("<II", UINT32, 1), tensors=1 << 63),
    "tensors 10^6": raw_gguf(
        text(b"a"), struct.pack("<II", UINT32, 1), bytes(30_000_000), tensors=10**6
    ),
    "value of type 99": raw_gguf(text(b"a"), struct.pack("<I", 99)),
    "cut": raw_gguf(text(b"a")),
    "width 2^31": gguf_file(shape(embedding_length=2**31 + 8)),
    "layers 2^31": gguf_file(shape(block_count=2**31 + 8)),
    "layers 1,000": gguf_file(shape(block_count=1000)),
    "heads 0": gguf_file(shape(head_count=0)),
    "heads 2^31": gguf_file(shape(head_count=2**31)),
    "context 0": gguf_file(shape(context_length=0)),
    "eps NaN": gguf_file(shape(layer_norm_rms_eps=float("nan"))),
    "heads a list": gguf_file(shape(head_count=[4, 4])),
    "3,000 nested pieces": gguf_file(pieces(3000)),
    "embedding flat": gguf_file(shape(), tensor=(64,)),
}


KINDS = {
    "config": CONFIGS,
    "weights": WEIGHTS,
    "text": TEXT,
    "templates": TEMPLATES,
    "gguf": GGUFS,
}


def write(folder: Path, change: Change) -> Path:
    """The demo checkpoint with a change. Returns the path to load, `m.gguf` in it if it exists."""
    folder.mkdir(parents=True)
    for source in SHIPPED_FOLDER.iterdir():
        (folder / source.name).symlink_to(source)
    change(folder)
    single = folder / "m.gguf"
    return single if single.exists() else folder


def loaded(cases: dict[str, Change], folder: Path) -> dict[str, Any]:
    paths = [write(folder / str(i), change) for i, change in enumerate(cases.values())]
    return dict(zip(cases, load_all(paths), strict=True))


def too_much(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one
        for name, one in found.items()
        if one.cpu_s > LIMIT_S or one.num_bytes > LIMIT_BYTES
    }


def every(step: int) -> dict[str, dict[str, Change]]:
    """Every `step`-th case of each kind."""
    kinds = {**KINDS, "legal": {**LEGAL, "as shipped": lambda folder: None}}
    return {kind: dict(list(cases.items())[::step]) for kind, cases in kinds.items()}


def check(kinds: dict[str, dict[str, Change]], folder: Path) -> dict[str, dict[str, Any]]:
    """Load all cases in processes forked from one; returns the results by kind and name."""
    names = [(kind, name) for kind, cases in kinds.items() for name in cases]
    changes = {str(name): kinds[name[0]][name[1]] for name in names}
    came = zip(names, loaded(changes, folder).values(), strict=True)
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for (kind, name), one in came:
        found[kind][name] = one
    for kind, ones in found.items():
        wanted = "loaded" if kind == "legal" else "LoadError"
        wrong = {name: one for name, one in ones.items() if one.kind != wanted}
        assert {name: one for name, one in wrong.items() if name not in HARMLESS} == {}, kind
        assert {one.kind for one in wrong.values()} <= {"loaded"}
        assert too_much(ones) == {}
        assert {name: one.message for name, one in ones.items() if len(one.message) > 1900} == {}
    return found
