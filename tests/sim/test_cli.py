"""The command line as a new user meets it: both quick starts of the README, and what goes wrong."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pfx
from models.python_docs import write
from pfx.cli import COMMANDS, main
from pfx.data import CHATML
from pfx.recipe.log import read_metrics
from pfx.recipe.weights import read_params, trained

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "models/configs"
SMALL = [
    "model.config.num_layers=1", "model.config.embed_dim=32", "model.config.num_heads=2",
    "model.config.num_kv_heads=2", "model.config.head_dim=16", "model.config.mlp_dim=32",
    "model.config.vocab_size=300", "model.config.max_seq_len=32", "data.seq_len=32",
    "data.split=0.8,0.2", "optimizer.warmup_steps=2", "train.steps=6", "train.batch_size=4",
    "evaluate.every=3", "evaluate.batches=2", "checkpoint.every=2",
]  # fmt: skip

Pfx = Callable[..., str]


@pytest.fixture
def pfx_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Pfx:
    """Run ``pfx`` in an empty folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        out = capsys.readouterr()
        return out.out + out.err

    return run


def settings(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--set", name)]


@pytest.mark.timeout(300)
def test_quick_start_pretrain_on_own_text(pfx_in: Pfx, tmp_path: Path):
    write(tmp_path / "data/docs.jsonl", most=40)
    made = pfx_in("tokenizer", "data/docs.jsonl", "--vocab-size", "300",
                  "--output", "data/tokenizer.json")  # fmt: skip
    assert made.startswith("data/tokenizer.json: 300 ids")
    with (tmp_path / "data/docs.jsonl").open("a") as file:
        file.write("{broken\n")
    made = pfx_in("preprocess", "data/docs.jsonl", "--tokenizer", "data/tokenizer.json",
                  "--output", "data/docs")  # fmt: skip
    assert "data/docs: 40 documents" in made and "data/docs.jsonl:41: " in made

    train = ["train", str(CONFIGS / "pretrain.py"), *settings(SMALL)]
    shown = pfx_in(*train)
    assert "step 1/6  loss   5." in shown and "evaluate at step 6: loss" in shown
    assert shown.endswith("done at step 6\n")
    again = pfx_in(*train)
    assert again.endswith("done at step 6: reason nothing is left of train.steps=6\n")
    assert "checkpoint at step 6: tier final" in shown
    record = json.loads((tmp_path / "runs/pretrain/config.json").read_text())
    assert record["from"]["train.steps"] == "--set"
    assert record["from"]["optimizer.lr"].endswith("pretrain.py")

    more = settings([*SMALL, "train.steps=8", "plan.dp=2", "plan.tp=2"])
    shown = pfx_in("train", str(CONFIGS / "pretrain.py"), *more)
    assert "resume at step 6" in shown and "changed at step 6: setting plan.tp: 1 -> 2" in shown
    assert sorted(read_metrics(tmp_path / "runs/pretrain/metrics.jsonl")) == list(range(1, 9))

    words = ["generate", "runs/pretrain", "--prompt", "The ", "--length", "4"]
    text = pfx_in(*words, "--temperature", "0")
    assert text.startswith("The ") and len(text) > len("The \n")
    assert pfx_in(*words, "--temperature", "0", "--tp", "2") == text
    assert "step-00000008" in pfx_in("ckpt", "ls", "runs/pretrain")
    assert "state" in pfx_in("ckpt", "show", "runs/pretrain", "--step", "8")
    assert "is sound" in pfx_in("ckpt", "verify", "runs/pretrain")

    shown = pfx_in("rerun", str(CONFIGS / "pretrain.py"), "8", *more)
    assert "run twice from one state: the same bits" in shown
    assert "losses that differ from the log: 0 of " in shown

    pfx_in("ckpt", "export", "runs/pretrain", "exported", "--dtype", "float32")
    pfx_in("convert", "exported", "imported")
    again = pfx_in("generate", "imported", "--prompt", "The ", "--length", "4",
                   "--temperature", "0", "--tokenizer", "data/tokenizer.json")  # fmt: skip
    assert again == text

    checkpoints = tmp_path / "runs/pretrain/checkpoints"
    shard = next((checkpoints / (checkpoints / "latest").read_text().strip()).glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert shard.name in pfx_in("ckpt", "verify", "runs/pretrain", code=1)
    shown = pfx_in("train", str(CONFIGS / "pretrain.py"), *more, code=1)
    assert "is damaged" in shown and "fix: pfx ckpt verify runs/pretrain; move step 8 away" in shown


def hugging_face_model(folder: Path) -> None:
    """A small Llama with tokenizer and chat template, as transformers writes them."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(["two and two"], trainer)
    config = transformers.LlamaConfig(
        vocab_size=bpe.get_vocab_size(), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )


@pytest.mark.timeout(300)
def test_quick_start_fine_tune_weights_on_chats(pfx_in: Pfx, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    hugging_face_model(tmp_path / "weights")
    chats = [
        {"messages": [{"role": "user", "content": f"{a} and {b}?"},
                      {"role": "assistant", "content": str(a + b)}]}
        for a in range(6) for b in range(6)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    made = pfx_in("preprocess", "chats.jsonl", "--chat", "--tokenizer", "weights",
                  "--output", "data/chats")  # fmt: skip
    assert "36 documents" in made
    shown = pfx_in("train", str(CONFIGS / "chat.py"), *settings(
        ["train.steps=12", "train.batch_size=4", "optimizer.lr=3e-3", "optimizer.warmup_steps=2"]
    ))  # fmt: skip
    assert "checkpoint at step 12: tier final" in shown
    losses = {s: r["loss"] for s, r in read_metrics(tmp_path / "runs/chat/metrics.jsonl").items()}
    assert losses[12] < losses[1] - 0.5

    pfx_in("convert", "runs/chat", "tuned", "--tokenizer", "weights", "--dtype", "float32")
    tuned = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        theirs = tuned(tokens).logits
    run = trained(tmp_path / "runs/chat")
    ours = run.functions.apply(read_params(run), tokens)
    torch.testing.assert_close(ours[..., : theirs.shape[-1]], theirs, atol=1e-4, rtol=1e-4)
    assert (tmp_path / "tuned/tokenizer.json").exists()
    pfx_in("convert", "tuned", "back")  # with the tokenizer that lies beside the weights
    assert pfx_in("generate", "back", "--prompt", "two", "--length", "1").startswith("two")

    other = settings(["model.config.num_layers=1", "directory=runs/other"])
    shown = pfx_in("train", str(CONFIGS / "chat.py"), *other, code=2)
    assert "model.weights='weights': the weights of another model." in shown
    assert "layers: 1 here, 2 there" in shown


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["train", "none.py"], 2, "ConfigError: none.py: is not there."),
        (["train", "c.py", "--set", "train.stepz=1"], 2, "fix: --set train.steps"),
        (
            ["train", "c.py", "--set", "optimizer.name=adamv"],
            2,
            "ConfigError: optimizer.name='adamv': unknown.",
        ),
        (
            ["train", "c.py", "--set", "optimizer.options.beta=1"],
            2,
            "optimizer.options.beta: no such option.",
        ),
        (
            ["train", "c.py", "--set", "optimizer.warmup_steps=50"],
            2,
            "ConfigError: optimizer.warmup_steps=50 and 1 of decay are more than train.steps=4.\n"
            "  fix: train.steps=51, or optimizer.warmup_steps=3",
        ),
        (
            ["train", "c.py", "--set", "plan.precision=bf17"],
            2,
            "ConfigError: Plan: precision='bf17': 'bf17' is no policy.",
        ),
        (["train", "c.py", "--set", "plan.zero=5"], 2, "zero=5 is no ZeRO stage."),
        (
            ["train", "c.py", "--set", "train.device=cuda0"],
            2,
            "ConfigError: train.device=cuda0 is not on this machine, or not in this torch.",
        ),
        (["train", "bad.py"], 2, "ConfigError: bad.py: Plan: precision='bf17'"),
        (
            ["train", "c.py", "--set", "data.seq_len=32"],
            2,
            "ConfigError: data.seq_len=32 is more than the model has positions.\n"
            "  model.config.max_seq_len=16\n  fix: data.seq_len=16",
        ),
        (
            ["train", "c.py", "--set", "train.batch_size=7", "--set", "plan.dp=2"],
            2,
            "ConfigError: train.batch_size=7 cannot be cut into equal parts.\n"
            "  plan.dp=2 x plan.microbatches=1; 7 % 2 = 1\n  fix: train.batch_size=8 or 6",
        ),
        (["train", "c.py", "--set", "model.module=models.llama"], 2, "model.config for models.llama"),
        (["train", "c.py", "--set", "model.module=json"], 2, "has no init, apply, axes, loss_fn"),
        (["train", "c.py"], 1, "DataError: nowhere"),
        (["ckpt", "ls", "nowhere"], 1, "CheckpointError: nowhere is no directory."),
        (["generate", "runs/none", "--prompt", "x"], 2, "runs/none: has no checkpoint of a run."),
        (["generate", "hf", "--prompt", "x"], 2, "  fix: pfx convert hf "),
        ([], 2, "pfx COMMAND --help says more."),
        (["ckpt", "show", "none"], 1, "CheckpointError: none is no directory."),
        (["convert", "none", "target"], 1, "WeightsError: none/config.json"),
        (["rerun", "c.py", "3"], 2, "metrics.jsonl: has no step 1."),
        (["preprocess", "x.jsonl", "--tokenizer", "bytes", "--output", "x", "--chat"], 2,
         "fix: --template chatml"),
        (["preprocess", "x.jsonl", "--tokenizer", "bytes", "--output", "x"], 1, "DataError: "),
    ],
)  # fmt: skip
def test_an_error_is_its_own_text_and_a_code(pfx_in: Pfx, tmp_path: Path, words, code, text):
    (tmp_path / "c.py").write_text(
        "from models import gpt\nfrom pfx.recipe import Data, Model, Run, Train\n"
        "def config():\n"
        "    sizes = gpt.Config(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8,"
        " vocab_size=64, max_seq_len=16)\n"
        "    return Run(model=Model(module='models.gpt', config=sizes),\n"
        "        data=Data(prefixes=('nowhere',), seq_len=16),"
        " train=Train(steps=4, batch_size=2))\n"
    )
    (tmp_path / "bad.py").write_text(
        "import pfx\ndef config():\n    return pfx.Plan(precision='bf17')\n"
    )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").touch()
    shown = pfx_in(*words, code=code)
    assert text in shown and "Traceback" not in shown


def test_an_interrupt_and_a_reader_who_leaves_are_no_tracebacks(pfx_in: Pfx, monkeypatch):
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("pfx.cli.ckpt"), "main", interrupted)
    assert pfx_in("ckpt", "ls", "none", code=130) == "interrupted\n"

    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "pfx", "ckpt", "ls", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_traceback_is_there_for_those_who_want_it(pfx_in: Pfx):
    with pytest.raises(pfx.errors.PfxError):
        main(["train", "none.py", "--traceback"])


def test_a_dry_run_shows_the_config_and_runs_nothing(pfx_in: Pfx, tmp_path: Path):
    write(tmp_path / "docs.jsonl", most=40)
    words = ["--tokenizer", "bytes", "--output", "data/docs"]
    pfx_in("preprocess", "docs.jsonl", *words, "--workers", "1")
    train = ["train", str(CONFIGS / "pretrain.py"), "--dry-run", *settings(SMALL)]
    record = json.loads(pfx_in(*train))
    assert record["config"]["train"]["steps"] == 6
    for wrong, code, text in (
        ("train.batch_size=5", 2, "ConfigError: train.batch_size=5"),
        ("data.prefixes=nowhere", 1, "DataError: nowhere.idx"),
    ):
        shown = pfx_in(*train, "--set", wrong, "--set", "plan.dp=2", code=code)
        assert shown.startswith("{") and text in shown
    assert not (tmp_path / "runs").exists()


def test_help_names_every_command_and_imports_none():
    probe = """
import sys
import pfx
before = set(sys.modules)
from pfx.cli import main
try:
    main(["--help"])
except SystemExit as done:
    assert not done.code
heavy = ("pfx.cli.", "pfx.data", "models", "rich", "tokenizers", "transformers")
print([name for name in set(sys.modules) - before if name.startswith(heavy)])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: pfx {command}" in shown and "--traceback" in shown


def commands_of(path: Path) -> list[str]:
    """The lines that call pfx, in a text."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line.startswith("pfx ") and "|" not in line]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(CONFIGS.glob("[!_]*.py"))], ids=str)
def test_the_commands_that_are_shown_can_be_given(path: Path):
    shown = commands_of(path)
    assert shown
    for line in shown:
        _, command, *words = shlex.split(line)
        importlib.import_module(f"pfx.cli.{command}").parser().parse_args(words)


def test_a_wrong_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main(["trian"])
    assert done.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err
