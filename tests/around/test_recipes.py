"""Recipes load, hold out, pack and train what they say (recipes/parts, recipes/pretrain.py)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pretrain
import pyarrow.parquet
import pytest
import torch
from configs import fp4_config
from parts import data
from parts.recipe import DataSection, Recipe, TokenizerSection, load_recipe, to_plain
from policy_settings import llama_flops
from registries import restored
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from snip_hf import PrecisionPlan, convert_model
from snip_hf.config import POLICIES
from snip_hf.policies.registry import rule_assignment
from snip_hf.policies.setting import Setting

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

WORDS = [f"{a}{b}" for a, b in itertools.product(["ba", "co", "du", "élan", "fi"], ["n", "rt", "ss", "x9", "_"])]
QUICKSTART = RECIPES / "quickstart.yaml"
NAMES = ["quickstart", "bf16", "fp8", "fp4", "snip-50", "snip-75", "snip-75-measured"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.fixture
def texts() -> list[str]:
    """Forty documents of 5 to 200 words, all different."""
    generator = random.Random(0)
    return [f"{i} " + " ".join(generator.choices(WORDS, k=generator.randint(5, 200))) for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    """The documents as files doc00.txt, doc01.txt, ..."""
    path = tmp_path / "texts"
    path.mkdir()
    for i, text in enumerate(texts):
        (path / f"doc{i:02}.txt").write_text(text, encoding="utf-8")
    return path


def section(folder: Path, **values: Any) -> DataSection:
    held_out = {} if "validation_files" in values else {"validation_fraction": 0.25}
    defaults = {"source": "files", "files": (f"{folder}/*",), "sequence_length": 16} | held_out
    return DataSection(**(defaults | values))


def rows(documents: Any) -> list[str]:
    return [row["text"] for row in documents]


def tokenizer_of(texts: list[str]) -> Any:
    return data.train_tokenizer(texts, TokenizerSection(vocab_size=300))


# --- packing


def test_packing_is_the_concatenation_of_all_documents_cut_into_rows(texts: list[str]) -> None:
    tokenizer = tokenizer_of(texts)
    concatenation: list[int] = []
    for text in texts * 4:  # More documents than one batch of the packer.
        concatenation += tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        concatenation.append(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    for length in (1, 7, 64):
        packed = list(data.packed_sequences(({"text": text} for text in texts * 4), tokenizer, length))
        assert all(len(row["input_ids"]) == length for row in packed)
        tokens = [token for row in packed for token in row["input_ids"]]
        assert tokens == concatenation[: len(concatenation) // length * length]


def test_streaming_gives_the_same_rows_as_preparing_all_data(folder: Path, texts: list[str]) -> None:
    tokenizer = tokenizer_of(texts)
    packed = {}
    for streaming in (False, True):
        asked = section(folder, streaming=streaming)
        train, validation = data.pack(*data.load_documents(asked), tokenizer, asked)
        assert isinstance(train, datasets.IterableDataset) == streaming
        packed[streaming] = ([row["input_ids"] for row in train], [row["input_ids"] for row in validation])
    assert packed[False] == packed[True]
    assert len(packed[True][0]) > len(packed[True][1]) > 0


def test_validation_takes_no_more_sequences_than_asked(folder: Path, texts: list[str]) -> None:
    asked = section(folder, validation_sequences=3)
    _, validation = data.pack(*data.load_documents(asked), tokenizer_of(texts), asked)
    assert len(validation) == 3


def test_chats_are_not_packed_as_text(folder: Path, texts: list[str]) -> None:
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    asked = section(folder, files=(str(file),), text_column="messages")
    documents = data.load_documents(asked)
    with pytest.raises(ValueError, match=r"text_column names chats, and recipes train on text\. Use TRL's"):
        data.pack(*documents, tokenizer_of(texts), asked)
    with pytest.raises(ValueError, match=r"text_column names chats, and recipes train on text\. Use TRL's"):
        data.load_tokenizer(TokenizerSection(vocab_size=300), None, documents[0])


def test_text_shorter_than_a_sequence_is_refused(folder: Path, texts: list[str]) -> None:
    asked = section(folder, sequence_length=100_000)
    with pytest.raises(ValueError, match="training text is shorter than one sequence of 100000 tokens"):
        data.pack(*data.load_documents(asked), tokenizer_of(texts), asked)


def test_collated_labels_are_the_input_ids_and_no_alias() -> None:
    batch = data.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    assert batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    batch["labels"][0, 0] = -100
    assert batch["input_ids"][0, 0] == 1


# --- documents and what is held out


def test_a_share_of_the_documents_is_held_out_and_none_is_in_both(folder: Path, texts: list[str]) -> None:
    train, held_out = map(rows, data.load_documents(section(folder)))
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)
    assert 4 <= len(held_out) <= 18  # 40 x 0.25; outside with probability 0.004 for a fair hash.


def test_held_out_files_are_taken_out_of_the_training_glob(folder: Path, texts: list[str]) -> None:
    train, held_out = map(rows, data.load_documents(section(folder, validation_files=(f"{folder}/doc0*.txt",))))
    assert held_out == texts[:10]
    assert train == texts[10:]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_jsonl_and_parquet_give_the_documents_of_their_text_column(tmp_path: Path, texts: list[str], kind: str) -> None:
    table = [{"id": i, "body": text} for i, text in enumerate([*texts, ""])]
    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    for streaming in (False, True):
        asked = section(tmp_path, files=(str(path),), text_column="body", streaming=streaming)
        train, held_out = map(rows, data.load_documents(asked))
        assert sorted(train + held_out) == sorted(texts)  # The empty document is gone.
    with pytest.raises(ValueError, match=r"data\.text_column='text' is not in the data; its columns are id, body"):
        data.load_documents(section(tmp_path, files=(str(path),)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset_is_read_by_split(tmp_path: Path, texts: list[str], streaming: bool) -> None:
    # `datasets` takes a folder for a Hub name, and finds the splits by the names of its files.
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, part in (("train", texts[:30]), ("validation", texts[30:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part), encoding="utf-8")
    hub = {"source": "hub", "dataset": str(folder), "sequence_length": 16, "streaming": streaming}
    train, held_out = map(rows, data.load_documents(DataSection(validation_split="validation", **hub)))
    assert (train, held_out) == (texts[:30], texts[30:])
    train, held_out = map(rows, data.load_documents(DataSection(validation_fraction=0.25, **hub)))
    assert sorted(train + held_out) == sorted(texts[:30])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_is_cut_at_its_separator_lines_only(tmp_path: Path, texts: list[str], streaming: bool) -> None:
    documents = [*texts, "a <|endoftext|> within a line stays", "two\n\nparagraphs"]
    # An empty document (two separators in a row) gives no row.
    lines = "\n<|endoftext|>\n".join([*documents[:3], "<|endoftext|>", *documents[3:]])
    (tmp_path / "corpus.txt").write_text(lines, encoding="utf-8")
    asked = section(tmp_path, files=(f"{tmp_path}/*.txt",), document_separator="<|endoftext|>", streaming=streaming)
    train, held_out = map(rows, data.load_documents(asked))
    assert sorted(train + held_out) == sorted(documents)


def test_the_standard_library_is_its_own_source_in_the_order_of_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "b.py",
        "a/z.py",
        "a.py",
        "notes.txt",
        "test/t.py",
        "a/tests/t.py",
        "lib2to3/l.py",
        "site-packages/s.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    (tmp_path / "empty.py").touch()
    (tmp_path / "latin.py").write_bytes("# größer".encode("latin-1"))
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert rows(data._standard_library()) == ["# a/z.py\n", "# a.py\n", "# b.py\n", "# notes.txt\n"]


def test_the_standard_library_of_this_python_is_found_and_held_out_by_file() -> None:
    train, held_out = map(rows, data.load_documents(load_recipe(QUICKSTART).data))
    source = Path(dataclasses.__file__).read_text(encoding="utf-8")
    assert (source in train) != (source in held_out)
    assert not set(train) & set(held_out)
    assert sum(map(len, train)) > 2_000_000
    assert len(held_out) >= 5


def test_a_pattern_without_files_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\*\.txt' matches no file"):
        data.load_documents(section(tmp_path, files=(f"{tmp_path}/none*.txt",)))


def test_files_of_two_kinds_are_refused(folder: Path) -> None:
    (folder / "more.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"files of several kinds \(json, text\)"):
        data.load_documents(section(folder))


# --- tokenizer


def test_the_same_text_gives_the_same_tokenizer_which_survives_saving(tmp_path: Path, texts: list[str]) -> None:
    first, second = tokenizer_of(texts), tokenizer_of(texts)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 300
    first.save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    unseen = "größer\tthan 日本 \x00 <>"  # Byte-level: text with bytes never seen in training comes back too.
    assert loaded.decode(loaded(unseen)["input_ids"]) == unseen
    assert loaded(texts)["input_ids"] == first(texts)["input_ids"]
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)


# --- recipes and overrides


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.training["output_dir"] == f"runs/{name}"
    json.dumps(to_plain(recipe))


def test_recipes_differ_from_the_quickstart_in_nothing_but_snip_and_the_folder() -> None:
    base = to_plain(load_recipe(QUICKSTART))
    for name in NAMES:
        plain = to_plain(load_recipe(RECIPES / f"{name}.yaml"))
        plain["training"]["output_dir"] = base["training"]["output_dir"]
        assert plain | {"snip": None} == base | {"snip": None}, name


def test_recipes_ask_for_what_their_names_say() -> None:
    snips = {name: load_recipe(RECIPES / f"{name}.yaml").snip for name in NAMES}
    assert snips["bf16"] is None
    assert snips["fp8"] is not None and snips["fp8"].policy == "uniform-fp8"
    assert snips["fp4"] is not None and snips["fp4"].policy == "uniform-fp4"
    for name, share in {"quickstart": 0.75, "snip-50": 0.5, "snip-75": 0.75}.items():
        assert snips[name] is not None and (snips[name].policy, snips[name].target_fp4_fraction) == ("snip", share)
    assert snips["snip-75-measured"] is not None and snips["snip-75-measured"].budget == "measured"


def test_the_recipe_of_adapters_trains_them_on_the_model_of_the_quickstart() -> None:
    recipe, base = load_recipe(RECIPES / "lora-fp4.yaml"), load_recipe(QUICKSTART)
    assert recipe.model.name_or_path == base.training["output_dir"]
    assert recipe.snip is not None and (recipe.snip.policy, recipe.snip.probes) == ("snip", 4)
    assert recipe.data == base.data


def test_the_recipe_of_the_paper_goes_on_from_the_quickstart_in_the_paper_s_setting() -> None:
    recipe, base = load_recipe(RECIPES / "snip-paper.yaml"), load_recipe(QUICKSTART)
    assert recipe.model.name_or_path == base.training["output_dir"] and recipe.data == base.data
    snip = recipe.snip
    assert snip is not None
    assert (snip.policy, snip.granularity, snip.target_fp4_fraction, snip.stages) == ("snip-paper", "layer", 0.75, None)
    assert snip.formats == ("fp4", "fp8") and snip.refresh_every == 100_000
    for policy in ("min-abs-err", "min-rel-err", "layer-type", "layer-position", "random", "uniform-fp8"):
        baseline = load_recipe(RECIPES / "snip-paper.yaml", [f"snip.policy={policy}", "snip.target_fp4_fraction=0.5"])
        assert baseline.snip is not None and baseline.snip.policy == policy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_a_recipe_with_adapters_builds_a_model_of_which_they_alone_are_trained(texts: list[str]) -> None:
    pytest.importorskip("peft")
    new = ["model.name_or_path=null", "model.model_type=llama", "tokenizer.vocab_size=300"]
    section = load_recipe(RECIPES / "lora-fp4.yaml", new).model
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    section = dataclasses.replace(section, config={**small, "num_key_value_heads": 4})
    model = pretrain.build_model(section, tokenizer_of(texts))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 and all("lora_" in name for name in trained)


def test_a_share_that_changes_and_a_budget_over_forward_gemms_are_overrides() -> None:
    changing = "snip.target_fp4_fraction=[[1, 0.9], [8, 0.5]]"
    snip = load_recipe(QUICKSTART, [changing, "snip.granularity=gemm", "snip.decides=forward"]).snip
    assert snip is not None and snip.target_fp4_fraction == ((1, 0.9), (8, 0.5))
    said = "policy snip, target at least 90.0% from step 1, 50.0% from step 8 of the forward GEMMs' FLOPs in FP4"
    assert pretrain._describe(snip) == said
    assert load_recipe(QUICKSTART).snip is not None
    assert (
        pretrain._describe(load_recipe(QUICKSTART).snip)
        == "policy snip, target at least 75.0% of the linears' FLOPs in FP4"
    )


def test_the_quickstart_refreshes_three_times_and_applies_each() -> None:
    recipe = load_recipe(QUICKSTART)
    assert recipe.snip is not None and recipe.snip.stages == 2
    probes = range(recipe.snip.first_refresh, recipe.training["max_steps"] + 1, recipe.snip.refresh_every)
    assert len([step for step in probes if step + recipe.snip.apply_delay <= recipe.training["max_steps"]]) >= 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "training:\n\tmax_steps: 3\n",
            ", line 2: this is no YAML (found character '\\t' that cannot start any token). ",
        ),
        ("training: [1\n", ", line 2: this is no YAML (expected ',' or ']', but got '<stream end>')."),
    ],
)
def test_a_recipe_that_is_no_yaml_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}{said}")) as caught:
        load_recipe(path)
    assert ("Indent with spaces, not tabs." in str(caught.value)) == ("\t" in text)


def test_overrides_are_dotted_keys_with_yaml_values() -> None:
    recipe = load_recipe(
        QUICKSTART,
        [
            "training.learning_rate=1e-4",
            "training.run_name=a=b",
            "model.config.hidden_size=128",
            "snip.skip_modules=[lm_head, '*.o_proj']",
            "eval.data_dir=null",
            "training.eval_strategy=no",
            "training.max_steps=5",
            "training.max_steps=7",
        ],
    )
    assert recipe.training["learning_rate"] == 1e-4
    assert recipe.training["run_name"] == "a=b"
    assert recipe.training["eval_strategy"] == "no"
    assert recipe.training["max_steps"] == 7
    assert recipe.model.config["hidden_size"] == 128
    assert recipe.model.config["num_hidden_layers"] == load_recipe(QUICKSTART).model.config["num_hidden_layers"]
    assert recipe.snip is not None and recipe.snip.skip_modules == ("lm_head", "*.o_proj")
    assert load_recipe(QUICKSTART, ["snip=null"]).snip is None
    assert load_recipe(RECIPES / "bf16.yaml", ["snip.target_fp4_fraction=0.5"]).snip.target_fp4_fraction == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.name=x", "recipe: the key 'modle' is not known; known keys are model, tokenizer, data, training, snip"),
        ("data.stream=true", "data: the key 'stream' is not known; known keys are source, files"),
        ("training.learning_rat=1", "training: the key 'learning_rat' is not known; known keys are output_dir"),
        (
            "snip.target=0.5",
            r"SnipConfig has no field 'target'\. Did you mean 'target_fp4_fraction'\? docs/config.md lists all ",
        ),
        ("training.max_steps", "'training.max_steps' is not understood; expected dotted.key=value"),
        ("training..x=1", "'training..x=1' is not understood"),
        ("data=3", "data: got 3; expected keys with values"),
        ("data.sequence_length=long", "data.sequence_length='long' has type str; expected int"),
        ("data.streaming=1", "data.streaming=1 has type int; expected bool"),
        ("data.validation_sequences=true", "data.validation_sequences=True has type bool; expected int"),
        ("data.files=a.txt", r"data.files='a.txt' has type str; expected tuple\[str, ...\]"),
        ("data.source=web", "data.source='web' is not known; expected one of python-stdlib, files, hub"),
        ("data.source=files", "data.source='files' needs data.files"),
        ("data.validation_fraction=0", "got no held-out data; expected exactly one of validation_files"),
        ("data.validation_fraction=1.5", "data.validation_fraction=1.5 is not between 0 and 1"),
        ("data.dataset=c4", "data.dataset belongs to data.source='hub', but the source is 'python-stdlib'"),
        ("model.name_or_path=gpt2", "expected exactly one of them"),
        ("tokenizer.vocab_size=null", "a new model needs a tokenizer"),
        ("tokenizer.name_or_path=gpt2", "the first takes a tokenizer, the second trains one"),
        ("data.streaming=true", "tokenizer.train_documents is null"),
        ("snip.target_fp4_fraction=2", "target_fp4_fraction=2 is outside 0..1"),
        ("snip.target_fp4_fraction=[[1, 0.9], [1, 0.5]]", "has step 1 after step 1; expected increasing steps"),
        ("snip.target_fp4_fraction='1:0.9'", "has type str"),
    ],
)
def test_a_bad_override_is_an_error_that_says_what_is_wrong(override: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        load_recipe(QUICKSTART, [override])


def test_a_policy_that_does_not_fit_the_model_is_one_line_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = llama_flops(4)

    def run(recipe: Recipe) -> dict[str, Any]:
        assert recipe.snip is not None
        return rule_assignment(Setting(recipe.snip, flops, (tuple(flops),)))

    monkeypatch.setattr(pretrain, "run", run)
    overrides = ["snip.policy=first2-last8-bf16", "snip.formats=[fp4,bf16]"]
    with pytest.raises(SystemExit) as stop:
        pretrain.main([str(QUICKSTART), "--override", *overrides])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(
        "policy='first2-last8-bf16' keeps the first 2 and the last 8 blocks in BF16, which are all of the model's 4 "
        "blocks. Use a rule that meets a target, e.g. policy='first2-last8'.\n"
    )


def test_a_model_that_no_run_has_left_is_one_line_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text", encoding="utf-8")
    overrides = ["data.source=files", "data.files=[text.txt]", "model.name_or_path=./runs/quickstart"]
    with pytest.raises(SystemExit) as stop:
        pretrain.main([str(RECIPES / "lora-fp4.yaml"), "--override", *overrides])
    assert stop.value.code == 2
    assert (
        "error: './runs/quickstart' is not a folder here, and has no tokenizer that loads: " in capsys.readouterr().err
    )


def test_a_recipe_names_a_policy_of_an_imported_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from snip_hf.policies.registry import *\nregister_policy(Policy(name='own', assign=lambda setting: {}))\n"
    (tmp_path / "own_policies.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pretrain, "run", lambda recipe: {"policy": recipe.snip.policy})
    with restored(POLICIES):
        told = pretrain.main([str(QUICKSTART), "--import", "own_policies", "--override", "snip.policy=own"])
    assert told == {"policy": "own"}


def test_a_base_is_read_relative_to_its_recipe_and_null_takes_a_section_out(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(QUICKSTART.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nsnip: null\ntraining: {max_steps: 3}\n", encoding="utf-8")
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.snip is None
    assert recipe.training == load_recipe(QUICKSTART).training | {"max_steps": 3, "output_dir": "runs/mine"}


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_recipe_that_is_its_own_base_is_refused_with_the_chain(names: list[str], tmp_path: Path) -> None:
    for name, base in zip(names, [*names[1:], names[0]], strict=True):
        (tmp_path / f"{name}.yaml").write_text(f"base: ../{tmp_path.name}/{base}.yaml\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("base: a.yaml\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"^base: the recipe is its own base \((.*)\)\. Take one `base:` out\.$"
    ) as caught:
        load_recipe(tmp_path / "mine.yaml")
    chain = re.findall(r"/(\w+)\.yaml", str(caught.value))
    assert chain == ["mine", *names, names[0]]


@pytest.mark.parametrize("base", ["3", "[a.yaml]"])
def test_a_base_that_is_no_path_is_refused(base: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base: {base}\n", encoding="utf-8")
    with pytest.raises(TypeError, match=r"^base: got .* in .*a\.yaml; expected the path of another recipe"):
        load_recipe(tmp_path / "a.yaml")


def test_the_examples_of_the_readme_load(tmp_path: Path) -> None:
    shutil.copy(QUICKSTART, tmp_path)
    examples = re.findall(r"```yaml\n(.*?)```", (RECIPES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    for i, example in enumerate(examples):
        (tmp_path / f"example{i}.yaml").write_text(example, encoding="utf-8")
        load_recipe(tmp_path / f"example{i}.yaml")


# --- the model


def test_an_unknown_field_of_the_architecture_is_refused(texts: list[str]) -> None:
    recipe = load_recipe(QUICKSTART, ["model.config.hidden_sizes=64"])
    with pytest.raises(ValueError, match=r"'hidden_sizes' is no field of 'llama'; its fields are .*hidden_size,"):
        pretrain.build_model(recipe.model, tokenizer_of(texts))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(texts: list[str]) -> None:
    recipe = load_recipe(QUICKSTART, ["model.config.vocab_size=100"])
    with pytest.raises(ValueError, match="The model has 100 embeddings, the tokenizer 300 tokens"):
        pretrain.build_model(recipe.model, tokenizer_of(texts))


# --- whole runs


def tiny(folder: Path, output: Path, *overrides: str) -> Recipe:
    sizes = ["hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=2"]
    return load_recipe(
        QUICKSTART,
        [
            "data.source=files",
            f"data.files=['{folder}/*.txt']",
            "data.validation_fraction=0.25",
            "data.sequence_length=32",
            "tokenizer.vocab_size=300",
            *(f"model.config.{size}" for size in [*sizes, "num_key_value_heads=1"]),
            "training.max_steps=8",
            "training.warmup_steps=1",
            "training.logging_steps=1",
            "training.eval_steps=4",
            "training.learning_rate=1e-2",
            "training.disable_tqdm=true",
            "training.use_cpu=true",
            f"training.output_dir={output}",
            "eval=null",
            "cpu_threads=1",
            *overrides,
        ],
    )


def losses(output: Path) -> dict[int, float]:
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}


def test_a_plain_run_learns_and_leaves_a_checkpoint_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = pretrain.run(tiny(folder, output, "snip=null"))
    curve = losses(output)
    assert list(curve) == list(range(1, 9))
    assert curve[8] < curve[1] - 0.5
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    recipe = tiny(folder, output, "snip=null")
    _, validation = data.pack(*data.load_documents(recipe.data), tokenizer, recipe.data)
    batch = data.collate(list(validation))
    with torch.no_grad():
        loss = model(**batch).loss.item()
    assert result["validation_loss"] == {"high_precision": pytest.approx(loss, rel=1e-5)}
    written = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert written["validation_loss"] == result["validation_loss"]
    assert not (output / "snip").exists()


@pytest.mark.parametrize("streaming", [slow("false"), "true"])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(folder: Path, tmp_path: Path, streaming: str) -> None:
    common = ["snip=null", "training.save_strategy=steps", "training.save_steps=4", "training.eval_strategy=no",
              f"data.streaming={streaming}", "tokenizer.train_documents=20"]  # fmt: skip
    pretrain.run(tiny(folder, tmp_path / "run", *common))
    whole = losses(tmp_path / "run")
    saved = tmp_path / "run" / "checkpoint-4"
    pretrain.run(tiny(folder, tmp_path / "path", *common, f"training.resume_from_checkpoint={saved}"))
    assert losses(tmp_path / "path") == whole
    # true: the last checkpoint in the output folder.
    shutil.copytree(saved, tmp_path / "true" / "checkpoint-4")
    pretrain.run(tiny(folder, tmp_path / "true", *common, "training.resume_from_checkpoint=true"))
    assert losses(tmp_path / "true") == whole


def test_snip_that_never_refreshes_in_bf16_gives_the_plain_runs_losses_to_the_bit(folder: Path, tmp_path: Path) -> None:
    plain = pretrain.run(tiny(folder, tmp_path / "plain", "snip=null"))
    snip = pretrain.run(tiny(folder, tmp_path / "snip", "snip.start_format=bf16", "snip.first_refresh=100"))
    assert losses(tmp_path / "snip") == losses(tmp_path / "plain")
    loss = plain["validation_loss"]["high_precision"]
    assert snip["validation_loss"] == {"plan": loss, "high_precision": loss}


def test_a_snip_run_refreshes_reports_and_evaluates_in_both_arithmetics(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    refreshes = ["snip.first_refresh=2", "snip.refresh_every=2", "snip.apply_delay=1", "snip.probe_tokens=128"]
    result = pretrain.run(tiny(folder, output, "training.max_steps=5", *refreshes))
    history = [json.loads(line) for line in (output / "snip" / "history.jsonl").read_text().splitlines()]
    refreshes = [line for line in history if line["event"] == "refresh"]
    assert [(line["step"], line["status"]) for line in refreshes] == [(s, "applied") for s in (2, 4)]
    assert all(min(line["stage_fp4_fractions"]) >= 0.75 for line in refreshes)
    assert len(history[0]["stages"]) == 2
    shown = capsys.readouterr().out
    assert "Refreshes" in shown
    assert (output / "snip" / "plan.png").stat().st_size > 0
    # The saved model alone gives the loss in high precision; its weights were trained under the plan.
    recipe = tiny(folder, output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    _, validation = data.pack(*data.load_documents(recipe.data), tokenizer, recipe.data)
    model = AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        loss = model(**data.collate(list(validation))).loss.item()
    assert result["validation_loss"]["high_precision"] == pytest.approx(loss, rel=1e-5)
    convert_model(model, fp4_config())
    PrecisionPlan.load(output / "snip" / "plan.json").apply(model)
    with torch.no_grad():
        loss = model(**data.collate(list(validation))).loss.item()
    assert result["validation_loss"]["plan"] == pytest.approx(loss, rel=1e-5)
    assert result["validation_loss"]["plan"] != pytest.approx(result["validation_loss"]["high_precision"], rel=1e-5)


def test_a_pretrained_folder_is_continued_with_its_own_tokenizer_under_snip(folder: Path, tmp_path: Path) -> None:
    first = pretrain.run(tiny(folder, tmp_path / "first", "snip=null"))
    pretrained = ["model.model_type=null", f"model.name_or_path={tmp_path / 'first'}", "tokenizer.vocab_size=null"]
    second = pretrain.run(tiny(folder, tmp_path / "second", *pretrained, "snip.first_refresh=100"))
    curve = json.loads((tmp_path / "second" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    assert curve[0]["step"] == 0
    assert curve[0]["eval_loss"] == pytest.approx(first["validation_loss"]["high_precision"], rel=0.02)
    assert second["validation_loss"]["high_precision"] < first["validation_loss"]["high_precision"]


def test_benchmarks_without_data_and_hub_are_skipped_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(pretrain, "_hub_answers", lambda: False)
    console = pretrain.Console(soft_wrap=True)
    pretrain.run_benchmarks(console, tmp_path, load_recipe(QUICKSTART).eval)
    shown = capsys.readouterr().out
    assert "Benchmarks skipped" in shown
    assert "--override eval.data_dir=DIR" in shown
    assert f"python eval/run.py {tmp_path} --tasks arc_easy,arc_challenge,mmlu --data-dir DIR" in shown
