"""eval/run.py scores like lm-eval's stock tasks, from the Hub's documents and from local files."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import run
import torch
from configs import fp4_config
from scoring import evaluate as scoring
from scoring import local_tasks, rows
from scoring.local_tasks import EvaluationError
from scoring.models import load_model, use_plan
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EVAL = Path(__file__).resolve().parents[2] / "eval"

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def no_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval lists what pip has installed and what the machine is, for a second each time; no row has it."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


END = "<|endoftext|>"

# One document per task, in the Hub's columns and in the local layout. The first is HellaSwag's own example.
HUB_AND_LOCAL: dict[str, tuple[Row, str, Row]] = {
    "arc_easy": (
        {"id": "a", "question": "Why?", "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"},
        "arc/ARC-Easy-test.jsonl",
        {"id": "a", "question": "Why?", "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"},
    ),
    "hellaswag": (
        {
            "activity_label": "Roof shingle removal",
            "ctx_a": "A man is sitting on a roof.",
            "ctx_b": "he",
            "endings": ["is using wrap.", "is ripping tiles off.", "is holding a cube.", "starts [step] roofing."],
            "label": "3",
        },
        "hellaswag/hellaswag_val.jsonl",
        {
            "query": "Roof shingle removal: A man is sitting on a roof. he",
            "choices": ["is using wrap.", "is ripping tiles off.", "is holding a cube.", "starts roofing."],
            "gold": 3,
        },
    ),
    "piqa": (
        {"goal": "open a jar?", "sol1": "twist", "sol2": "shout", "label": 0},
        "piqa/piqa_validation.jsonl",
        {"query": "Question: open a jar?\n", "choices": ["twist", "shout"], "gold": 0},
    ),
    "boolq": (
        {"passage": "Snow is cold.\nQuestion: is it", "question": "is snow cold", "label": 1, "idx": 0},
        "boolq/boolq_validation.jsonl",
        {
            "query": "Passage: Snow is cold.\nQuestion: is it\nQuestion: is snow cold?",
            "choices": ["no", "yes"],
            "gold": 1,
        },
    ),
    "winogrande": (
        {"sentence": "Ann saw Bea so _ waved.", "option1": "Ann", "option2": "Bea", "answer": "2"},
        "winogrande/winogrande_xl_validation.jsonl",
        {"context_options": ["Ann saw Bea so Ann", "Ann saw Bea so Bea"], "continuation": "waved.", "gold": 1},
    ),
    "openbookqa": (
        {
            "question_stem": "Predators eat",
            "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": ["A", "B", "C", "D"]},
            "answerKey": "C",
        },
        "openbookqa/openbookqa_test.jsonl",
        {"query": "Predators eat", "choices": ["lions", "humans", "bunnies", "grass"], "gold": 2},
    ),
    "lambada_openai": (
        {"text": "He saw a light and then the light"},
        "lambada/lambada_openai_test.jsonl",
        {"context": "He saw a light and then the", "continuation": "light"},
    ),
}
# wiki.test.raw, and what the Hub's document-level dataset makes of it.
WIKI_PAGES = [" = One = \n \n Text , one . \n = = Part = = \n More . ", " = Two = \n Last @-@ one . "]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variables that `main` sets; the libraries read the real ones on import."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TQDM_DELAY", "3")


def _write_lines(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _arc(number: int, labels: str = "ABCD") -> Row:
    texts = [f"{number} {word}" for word in ("red", "green light", "blue", "a very dark colour")][: len(labels)]
    choices = {"text": texts, "label": list(labels)}
    return {"id": str(number), "question": f"Colour {number}?", "choices": choices, "answerKey": labels[number % 3]}


def _mmlu_subjects() -> list[str]:
    stock = local_tasks.stock_tasks()
    return [name.removeprefix("mmlu_") for name in stock.all_subtasks if name.startswith("mmlu_")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny files in the layout of eval/README.md."""
    folder = tmp_path_factory.mktemp("data")
    for _, path, row in HUB_AND_LOCAL.values():
        _write_lines(folder / path, [row])
    questions = [_arc(n) for n in range(10)] + [_arc(10, "1234"), _arc(11, "ABC")]
    _write_lines(folder / "arc/ARC-Challenge-test.jsonl", questions)
    lines = [{"context": f"the {n} light and the", "continuation": word} for n, word in enumerate(("light", "cube"))]
    _write_lines(folder / "lambada/lambada_openai_test.jsonl", [HUB_AND_LOCAL["lambada_openai"][2], *lines])
    (folder / "wikitext-2-raw").mkdir()
    (folder / "wikitext-2-raw/wiki.test.raw").write_text(" \n" + "\n".join(WIKI_PAGES), encoding="utf-8")
    for index, subject in enumerate(_mmlu_subjects()):
        for split, count in (("dev", 2), ("test", 1 + index % 3)):
            path = folder / f"mmlu/{split}/{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                for n in range(count):
                    csv.writer(file).writerow(
                        [f"{split} {n},\nor {index}?", "w", " x", "y", "z", "ABCD"[(index + n) % 4]]
                    )
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two blocks with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Question: what colour is the light?\nAnswer: red green blue dark"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=320, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, **sizes)
    # Weights large enough for clearly different likelihoods.
    config.initializer_range = 0.2
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> tuple[Any, Any]:
    return load_model(str(model_dir), "cpu")


@pytest.fixture(scope="module")
def likelihood(loaded: tuple[Any, Any]) -> Callable[[str, str], float]:
    """log P(continuation | context) by one plain forward pass: no batching, no padding, no cache."""
    model, tokenizer = loaded

    def score(context: str, continuation: str) -> float:
        start, rest = tokenizer(context).input_ids, tokenizer(continuation).input_ids
        with torch.no_grad():
            log_probabilities = model(torch.tensor([start + rest])).logits[0].double().log_softmax(-1)
        return sum(log_probabilities[len(start) + i - 1, token].item() for i, token in enumerate(rest))

    return score


def _local(data: Path, names: list[str], tmp_path: Path, num_fewshot: int | None = None) -> Row:
    manager = local_tasks.local_tasks(local_tasks.stock_tasks(), data, num_fewshot, tmp_path)
    return dict(manager.load(names)["tasks"])


def test_a_device_that_is_not_there_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EvaluationError, match="--device cuda:1 needs a CUDA device, and torch finds none"):
        load_model("nowhere", "cuda:1")


@pytest.mark.parametrize("name", HUB_AND_LOCAL)
def test_local_rows_give_the_prompt_target_and_choices_of_the_hub_rows(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_row, _, _ = HUB_AND_LOCAL[name]
    hub = datasets.DatasetDict({s: datasets.Dataset.from_list([hub_row]) for s in ("train", "validation", "test")})
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: hub)
    stock = local_tasks.stock_tasks().load([name])["tasks"][name]
    local = _local(data, [name], tmp_path)[name]
    for stock_doc, local_doc in zip(stock.eval_docs, list(local.eval_docs)[:1], strict=True):
        assert stock.doc_to_text(stock_doc) == local.doc_to_text(local_doc)
        assert str(stock.doc_to_target(stock_doc)) == str(local.doc_to_target(local_doc))
        if stock.config.doc_to_choice is not None:
            assert stock.doc_to_choice(stock_doc) == local.doc_to_choice(local_doc)


def test_wikitext_is_cut_into_pages_at_first_level_headings_only(data: Path, tmp_path: Path) -> None:
    pages = _local(data, ["wikitext"], tmp_path)["wikitext"].eval_docs["page"]
    assert list(pages) == WIKI_PAGES


def test_mmlu_few_shot_examples_are_the_first_dev_rows_in_the_stock_format(data: Path, tmp_path: Path) -> None:
    task = _local(data, ["mmlu_anatomy"], tmp_path, num_fewshot=2)["mmlu_anatomy"]
    index = _mmlu_subjects().index("anatomy")

    def question(split: str, n: int, answer: str) -> str:
        return f"{split} {n},\nor {index}?\nA. w\nB.  x\nC. y\nD. z\nAnswer:{answer}"

    answers = ["ABCD"[(index + n) % 4] for n in range(2)]
    examples = "".join(question("dev", n, f" {answer}\n\n") for n, answer in enumerate(answers))
    head = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    assert task.fewshot_context(task.eval_docs[0], 2) == head + examples + question("test", 0, "")


def test_accuracies_match_likelihoods_computed_by_hand(
    data: Path, loaded: tuple[Any, Any], likelihood: Callable[[str, str], float]
) -> None:
    [row] = scoring.evaluate(*loaded, ["arc_challenge"], data, scoring.Settings(batch_size=3))
    hits, normalised_hits = [], []
    for line in (data / "arc/ARC-Challenge-test.jsonl").read_text(encoding="utf-8").splitlines():
        doc = json.loads(line)
        texts, gold = doc["choices"]["text"], doc["choices"]["label"].index(doc["answerKey"])
        scores = [likelihood(f"Question: {doc['question']}\nAnswer:", f" {text}") for text in texts]
        normalised = [score / len(text) for score, text in zip(scores, texts, strict=True)]
        hits.append(scores.index(max(scores)) == gold)
        normalised_hits.append(normalised.index(max(normalised)) == gold)
    mean = sum(hits) / 12
    assert 0 < mean < 1 and hits != normalised_hits, "the oracle would not notice a wrong choice"
    assert row["metrics"]["acc"]["value"] == mean
    assert row["metrics"]["acc_norm"]["value"] == sum(normalised_hits) / 12
    assert row["metrics"]["acc"]["stderr"] == pytest.approx(math.sqrt(mean * (1 - mean) / 11))
    assert row["chance"] == pytest.approx((11 / 4 + 1 / 3) / 12)


def test_perplexities_match_likelihoods_computed_by_hand(
    data: Path, loaded: tuple[Any, Any], likelihood: Callable[[str, str], float]
) -> None:
    lambada, wikitext = scoring.evaluate(*loaded, ["lambada_openai", "wikitext"], data)
    docs = [("He saw a light and then the", " light")]
    docs += [("the 0 light and the", " light"), ("the 1 light and the", " cube")]
    mean = sum(likelihood(*doc) for doc in docs) / len(docs)
    assert lambada["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert lambada["chance"] is None
    # The detokenized pages, by hand; bytes and words are counted before.
    pages = ["= One =\n\nText, one.\n== Part ==\nMore. ", "= Two =\nLast-one. "]
    total = sum(likelihood(END, " " + page) for page in pages)
    size = sum(len(page.encode()) for page in WIKI_PAGES)
    assert wikitext["metrics"]["bits_per_byte"]["value"] == pytest.approx(-total / size / math.log(2), rel=1e-4)


@pytest.mark.slow
def test_mmlu_gives_57_subjects_and_groups_weighted_by_documents(
    data: Path, loaded: tuple[Any, Any], likelihood: Callable[[str, str], float]
) -> None:
    rows = scoring.evaluate(*loaded, ["mmlu"], data)
    by_name = {row["task"]: row for row in rows}
    assert [row["task"] for row in rows[:2]] == ["mmlu", "mmlu_stem"] and len(rows) == 1 + 4 + 57
    correct = {}
    for index, subject in enumerate(_mmlu_subjects()):
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        correct[subject] = 0
        for n in range(1 + index % 3):
            prompt = f"{head}test {n},\nor {index}?\nA. w\nB.  x\nC. y\nD. z\nAnswer:"
            scores = [likelihood(prompt, f" {letter}") for letter in "ABCD"]
            correct[subject] += scores.index(max(scores)) == (index + n) % 4
        assert by_name[f"mmlu_{subject}"]["metrics"]["acc"]["value"] == correct[subject] / (1 + index % 3)
    assert by_name["mmlu"]["metrics"]["acc"]["value"] == pytest.approx(sum(correct.values()) / 114)
    assert by_name["mmlu"]["num_samples"] == 114 and by_name["mmlu"]["chance"] == 0.25
    stem = [row for row in rows if row["group"] == "mmlu_stem"]
    expected = sum(row["metrics"]["acc"]["value"] * row["num_samples"] for row in stem)
    assert by_name["mmlu_stem"]["metrics"]["acc"]["value"] == pytest.approx(
        expected / sum(row["num_samples"] for row in stem)
    )


def test_command_writes_a_complete_json_line_per_task_and_prints_a_table(
    data: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "results.jsonl"
    arguments = [str(model_dir), "--tasks", "arc_easy,hellaswag", "--data-dir", str(data), "--limit", "1"]
    arguments += ["--output", str(output), "--seed", "7"]
    assert run.main(arguments) == 0
    assert run.main(arguments) == 0, "a second run adds to the file"
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["task"] for line in lines] == ["arc_easy", "hellaswag"] * 2
    line = lines[0]
    assert line | {"metrics": None, "git_commit": None, "command": None, "versions": None, "date": None} == {
        "task": "arc_easy",
        "group": None,
        "metrics": None,
        "chance": 0.5,
        "task_version": "1.0",
        "num_fewshot": 0,
        "num_samples": 1,
        "num_documents": 1,
        "model": str(model_dir),
        "arithmetic": "bf16",
        "plan": None,
        "limit": 1,
        "seed": 7,
        "batch_size": 16,
        "data": str(data),
        "dtype": "float32",
        "git_commit": None,
        "command": None,
        "versions": None,
        "date": None,
    }
    assert line["metrics"]["acc"]["stderr"] is None, "one document has no standard error"
    assert torch.__version__.startswith(line["versions"]["torch"])
    assert set(line["versions"]) == {"torch", "transformers", "datasets", "lm_eval", "snip_hf"}
    assert lines[1]["task_version"] == "1.0+local"
    table = capsys.readouterr().out
    assert table.startswith("task       metric    value")
    assert "arc_easy" in table and "0.5000" in table


def test_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(["git", "-C", str(EVAL), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode or not (EVAL.parent / ".git").exists():
        pytest.skip("not in a git checkout with a commit")
    commit = rows.git_commit()
    assert commit is not None and commit.removesuffix("-dirty") == head.stdout.strip()


def test_an_archive_of_the_checkout_knows_its_commit(tmp_path: Path) -> None:
    git = ["git", "-C", str(EVAL.parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode or not (EVAL.parent / ".git").exists():
        pytest.skip("not in a git checkout with a commit")
    archive = subprocess.run([*git, "archive", "HEAD", "eval", ".gitattributes"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True)
    code = "from scoring.rows import git_commit; print(git_commit())"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "eval", capture_output=True, text=True)
    assert found.stdout == head.stdout


def test_command_starts_without_the_package_or_heavy_imports() -> None:
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(EVAL)!r}); sys.argv = ['run.py', '--help']\n"
        f"try: runpy.run_path({str(EVAL / 'run.py')!r}, run_name='__main__')\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"--data-dir" in done.stdout and done.stdout.split()[-1] == b"False"


def test_local_data_switch_the_hub_off_before_the_libraries_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name)
    scoring.set_environment(None, model_is_local=True)
    assert "HF_DATASETS_OFFLINE" not in os.environ and "HF_HUB_OFFLINE" not in os.environ
    scoring.set_environment("x", model_is_local=False)
    assert os.environ["HF_DATASETS_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in os.environ, "the model is on the Hub"
    scoring.set_environment("x", model_is_local=True)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_hub_out_of_reach_names_both_ways_out(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(**where: str) -> None:
        asked.append((where["path"], where["name"]))
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(EvaluationError, match=r"arc_easy.*--data-dir DIR.*connect to the Hub once.*HF_HOME"):
        scoring.evaluate(*loaded, ["arc_easy"])
    assert asked == [("allenai/ai2_arc", "ARC-Easy")], "the stock data are the default"


@pytest.mark.parametrize(
    ("tasks", "num_fewshot", "message"),
    [
        ("arc_eazy", None, r"Unknown task 'arc_eazy'; known are arc_easy, .*, mmlu, .*mmlu_anatomy"),
        ("mmlu,mmlu_stem", None, r"is asked for twice, last by 'mmlu_stem'; name each task once"),
        ("hellaswag", 2, r"hellaswag: few-shot examples come from the split 'train', for which the local"),
        ("arc_easy", 2, r"arc_easy: .*ARC-Easy-train.jsonl does not exist"),
    ],
)
def test_tasks_that_cannot_be_run_say_why(
    tasks: str, num_fewshot: int | None, message: str, data: Path, loaded: tuple[Any, Any]
) -> None:
    with pytest.raises(EvaluationError, match=message):
        scoring.evaluate(*loaded, tasks.split(","), data, scoring.Settings(num_fewshot=num_fewshot))


def test_missing_and_malformed_files_are_named(tmp_path: Path, loaded: tuple[Any, Any]) -> None:
    with pytest.raises(EvaluationError, match=r"piqa: .*piqa_validation.jsonl does not exist"):
        scoring.evaluate(*loaded, ["piqa"], tmp_path)
    _write_lines(tmp_path / "piqa/piqa_validation.jsonl", [HUB_AND_LOCAL["piqa"][2], {"query": "Question: x"}])
    with pytest.raises(EvaluationError, match=r"piqa_validation.jsonl, row 2: KeyError\('choices'\)"):
        scoring.evaluate(*loaded, ["piqa"], tmp_path)
    with pytest.raises(EvaluationError, match=r"--data-dir .*nowhere is not a folder"):
        scoring.evaluate(*loaded, ["piqa"], tmp_path / "nowhere")


def test_command_reports_a_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, problem in ((tmp_path, ""), (tmp_path / "nowhere", " is not a folder here, and")):
        assert run.main([str(folder), "--tasks", "piqa", "--data-dir", str(tmp_path)]) == 1
        message = f"'{folder}'{problem} could not be loaded as a causal language model"
        assert message in capsys.readouterr().err


def test_without_lm_eval_one_sentence_says_how_to_install_it(
    model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run.main([str(model_dir), "--tasks", "piqa", "--data-dir", str(data)]) == 1
    assert capsys.readouterr().err.endswith(
        'error: eval/run.py needs lm-eval, which is not installed. Install it: pip install "snip-hf[eval]"\n'
    )


@pytest.fixture
def saved_plan(model_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Writes a plan that runs the model's linears in one format."""
    from snip_hf.costs.flops import linear_flops
    from snip_hf.layers.convert import convert_model
    from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

    model, _ = load_model(str(model_dir), "cpu")
    patterns = {"skip_modules": ["*.down_proj"], "include_modules": ["lm_head"]}
    convert_model(model, fp4_config(**patterns))
    flops = linear_flops(model)
    provenance = PlanProvenance(step=0, policy="test", config=patterns)

    def save(number_format: str) -> Path:
        path = tmp_path / f"{number_format}.json"
        PrecisionPlan.uniform(flops, number_format, [list(flops)], provenance).save(path)
        return path

    return save


def test_plan_arithmetic_runs_the_planned_layers_quantized_and_no_others(
    data: Path, model_dir: Path, saved_plan: Callable[[str], Path], tmp_path: Path
) -> None:
    from snip_hf.layers.state import snip_linears

    def perplexity(*extra: str) -> float:
        output = tmp_path / "out.jsonl"
        base = [str(model_dir), "--tasks", "lambada_openai", "--data-dir", str(data), "--output", str(output)]
        assert run.main([*base, *extra]) == 0
        row = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
        assert row["arithmetic"] == ("plan" if extra else "bf16") and row["plan"] == (extra[-1] if extra else None)
        return float(row["metrics"]["perplexity"]["value"])

    usual = perplexity()
    in_fp4 = perplexity("--arithmetic", "plan", "--plan", str(saved_plan("fp4")))
    assert abs(math.log(in_fp4 / usual)) > 1e-3
    assert perplexity("--arithmetic", "plan", "--plan", str(saved_plan("bf16"))) == pytest.approx(usual, rel=1e-5)
    model, _ = load_model(str(model_dir), "cpu")
    use_plan(model, str(model_dir), str(saved_plan("fp4")))
    linears = snip_linears(model)
    assert len(linears) == 2 * 6 + 1 and all(linear.formats["forward"] == "fp4" for linear in linears.values())


def test_the_plan_of_a_frozen_base_scores_the_merged_model(
    model_dir: Path, saved_plan: Callable[[str], Path], tmp_path: Path
) -> None:
    path = saved_plan("fp4")
    plan = json.loads(path.read_text(encoding="utf-8"))
    for layer, formats in plan["assignment"].items():
        del formats["grad_weight"]
        plan["flops"][layer]["grad_weight"] = 0
    path.write_text(json.dumps(plan), encoding="utf-8")
    model, _ = load_model(str(model_dir), "cpu")
    assert use_plan(model, str(model_dir), str(path)) == str(path)


def test_plan_is_found_in_the_models_folder(
    model_dir: Path, saved_plan: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(str(model_dir), "cpu")
    with pytest.raises(EvaluationError, match=r"--arithmetic plan: .*plan.json.*with --plan PATH"):
        use_plan(model, str(model_dir), None)
    (model_dir / "snip").mkdir()
    target = model_dir / "snip/plan.json"
    saved_plan("fp8").rename(target)
    assert use_plan(model, str(model_dir), None) == str(target)


def test_plan_of_another_model_is_refused(model_dir: Path, saved_plan: Callable[[str], Path]) -> None:
    path = saved_plan("fp4")
    path.write_text(path.read_text(encoding="utf-8").replace("layers.1.", "layers.7."), encoding="utf-8")
    model, _ = load_model(str(model_dir), "cpu")
    with pytest.raises(EvaluationError, match=r"no entry for layer 'model.layers.1.*with --plan PATH"):
        use_plan(model, str(model_dir), str(path))
