"""Continuations are scored as the whole text would be, whatever is scored beside them; lm-eval gets the same."""

import json

import pytest
import torch

from megafp8.cli.main import main
from megafp8.core.errors import ConfigError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.likelihood import likelihoods
from megafp8.infer.weights import build_model
from tests.unit.infer.models import config_of, masters_of, save_model

BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def model():
    config = config_of(num_kv_heads=2)
    return build_model(config, {n: t.double() for n, t in masters_of(config).items()})


def test_each_pair_by_itself(model):
    pairs = [([5, 80], [200, 3, 7]), ([9], [1]), (list(range(40)), [2, 2]), ([4], [])]
    found = likelihoods(model, pairs, batch=3)
    for (context, continuation), one in zip(pairs, found, strict=True):
        ids = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            logs = torch.log_softmax(model(ids)[0].float(), -1)
        wanted = sum(float(logs[len(context) - 1 + i, token]) for i, token in enumerate(continuation))
        # fp32 logarithms of up to 3 tokens, each about 10: 3 * 10 * 2^-24
        assert one.log_probability == pytest.approx(wanted, abs=2e-6)
    assert found[3].log_probability == 0 and found[3].is_greedy


def test_greedy_is_told(model):
    from megafp8.infer.generate import generate

    (likely,) = generate(model, [[5, 80]], max_new_tokens=4)
    other = [*likely[:3], (likely[3] + 1) % 260]
    assert [one.is_greedy for one in likelihoods(model, [([5, 80], likely), ([5, 80], other)])] == [True, False]


def test_long_contexts_lose_their_beginning_and_it_is_said(model):
    context = [i % 250 for i in range(200)]
    (long,) = likelihoods(model, [(context, [7, 8])])
    (fits,) = likelihoods(model, [(context[-95:], [7, 8])])
    assert long.cut == 200 + 2 - 97 and fits.cut == 0 and long.log_probability == fits.log_probability
    with pytest.raises(ConfigError, match="a continuation of 97 tokens; the model has 96 positions"):
        likelihoods(model, [([1], [2] * 97)])
    with pytest.raises(ConfigError, match="a context without tokens"):
        likelihoods(model, [([], [2])])


TASK = """task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
TASK_GENERATES = """task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def test_tasks_of_the_harness(tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install lm-eval")
    rows = [{"question": f"Question {i}:", "choices": [" yes", " no", " maybe so"], "answer": i % 3} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    for name, text in (("tiny", TASK), ("tiny_text", TASK_GENERATES)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.format(file=tmp_path / "rows.jsonl"))
    config = config_of(num_kv_heads=2)
    path = save_model(tmp_path / "run" / "checkpoints", config)
    words = ["eval", "--tasks", "tiny,tiny_text", str(path), "--include", str(tmp_path / "tasks"), "--dtype", "fp32"]
    assert main([*words, "--save", "t"]) == 0
    kept = json.loads((tmp_path / "run" / "tasks" / "t.json").read_text())
    model = build_model(config, masters_of(config))
    right = 0
    for row in rows:
        ids = BYTES.encode(row["question"])
        scores = [one.log_probability for one in likelihoods(model, [(ids, BYTES.encode(c)) for c in row["choices"]])]
        right += scores.index(max(scores)) == row["answer"]
    assert kept["results"]["tiny"]["acc,none"] == pytest.approx(right / 12)
    assert "tiny" in capsys.readouterr().out
    assert main([*words[:2], "no_such_task", *words[3:]]) == 2
    assert "no_such_task: not one of lm-eval's" in capsys.readouterr().err


def test_what_tasks_cannot_go_with(tmp_path, capsys):
    path = save_model(tmp_path / "checkpoints", config_of())
    assert main(["eval", "--tasks", "a", str(path), "--text", "x"]) == 2
    assert "leave out --data and --text" in capsys.readouterr().err
    assert main(["eval", "--perplexity", str(path)]) == 2
    assert "give --data PREFIX or --text FILE" in capsys.readouterr().err
