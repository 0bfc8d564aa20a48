"""Labels of layers are as short as is unambiguous."""

import random

import pytest

from snip_hf.layers.labels import LayerLabels, endings, split_layer, without_numbers

LLAMA = [
    f"model.layers.{block}.{kind}"
    for block in range(3)
    for kind in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]
GPT2 = [f"transformer.h.{block}.{kind}" for block in range(2) for kind in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]
T5 = [
    *(f"encoder.block.{block}.layer.{kind}" for block in range(2) for kind in ("0.SelfAttention.q", "1.Dense.wi")),
    *(
        f"decoder.block.{block}.layer.{kind}"
        for block in range(2)
        for kind in ("0.SelfAttention.q", "1.EncDecAttention.q", "2.Dense.wi")
    ),
]
QWEN2_MOE = [
    "model.layers.0.mlp.down_proj",
    *(
        f"model.layers.1.mlp.{kind}"
        for kind in ("experts.gate_up_proj", "experts.down_proj", "shared_expert.down_proj")
    ),
]
BERT = [f"bert.encoder.layer.0.{kind}.dense" for kind in ("attention.output", "intermediate", "output")]


def brute_force(names: list[str]) -> list[str]:
    """The first of the endings of each name that no other name has, tried one after the other."""
    found = []
    for index, name in enumerate(names):
        parts = name.split(".")
        others = [f".{other}" for at, other in enumerate(names) if at != index]
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        found.append(next((end for end in ends if not any(one.endswith(f".{end}") for one in others)), name))
    return found


def test_endings_are_those_of_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(300):
        names = [".".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 8))]
        assert endings(names) == brute_force(names)


def test_a_name_that_others_end_with_stays_whole() -> None:
    assert endings(["a.output.dense", "output.dense", "b.dense", "x.x"]) == [
        "a.output.dense",
        "output.dense",
        "b.dense",
        "x",
    ]
    assert endings(["a.b", "a.b"]) == ["a.b", "a.b"]


@pytest.mark.parametrize(
    ("layers", "last"),
    [
        (LLAMA, ["2 q_proj", "2 o_proj", "2 gate_proj", "2 down_proj"]),
        (GPT2, ["1 c_attn", "1 attn.c_proj", "1 mlp.c_proj"]),
        (T5[:4], ["1 q", "1 wi"]),
        (
            T5,
            [
                "encoder 1 SelfAttention.q",
                "encoder 1 1.Dense.wi",
                *(
                    f"decoder {n} {kind}"
                    for n in (0, 1)
                    for kind in ("SelfAttention.q", "EncDecAttention.q", "2.Dense.wi")
                ),
            ],
        ),
        (QWEN2_MOE, ["0 mlp.down_proj", "1 gate_up_proj", "1 experts.down_proj", "1 shared_expert.down_proj"]),
        (BERT, ["0 attention.output.dense", "0 intermediate.dense", "0 output.dense"]),
        (["visual.blocks.0.fc", "language_model.layers.0.fc"], ["blocks 0 fc", "layers 0 fc"]),
        (["a.x.0.q", "b.x.0.q", "a.y.0.q", "b.y.0.q"], ["a.x 0 q", "b.x 0 q", "a.y 0 q", "b.y 0 q"]),
        (["0.q", "encoder.0.q", "encoder.1.q", "pooler.q"], ["0 q", "encoder 0 q", "encoder 1 q", "pooler.q"]),
        (["encoder.0.q", "pooler.dense"], ["0 q", "dense"]),
    ],
)
def test_layers_have_the_shortest_labels_that_tell_them_apart(layers: list[str], last: list[str]) -> None:
    shown = LayerLabels(layers)
    labels = [shown.layer(layer) for layer in layers]
    assert labels[-len(last) :] == last
    assert len(set(labels)) == len(layers)


def test_all_blocks_are_named_with_their_stack_where_two_have_the_same_number() -> None:
    layers = ["encoder.block.0.wi", *(f"decoder.block.{block}.wi" for block in range(3))]
    shown = LayerLabels([*layers, "head"])
    labels = [shown.layer(layer) for layer in (*layers, "head")]
    assert labels == ["encoder 0 wi", "decoder 0 wi", "decoder 1 wi", "decoder 2 wi", "head"]


def test_a_block_and_the_rest_of_a_name() -> None:
    assert split_layer("a.layers.3.mlp.up_proj") == ("a.layers.3", "mlp.up_proj")
    assert split_layer("pooler.dense") == ("", "pooler.dense")


def test_numbers_that_are_whole_parts_are_left_out() -> None:
    assert without_numbers("layers.0.experts.17.w1") == "layers.*.experts.*.w1"


def test_the_copy_of_a_layer_for_an_adapter_has_the_label_of_the_layer() -> None:
    copies = [f"layers.0.mlp.{name}.modules_to_save.default" for name in ("up_proj", "down_proj")]
    shown = LayerLabels(["layers.0.self_attn.q_proj", *copies])
    assert [shown.layer(layer) for layer in copies] == ["0 up_proj", "0 down_proj"]
