"""config.json and tokenizer files: what is supported is read, anything else is an error that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pfx
from models import gpt, hf, llama
from pfx.interop.hf import WeightsError, chat_template, special_tokens, tokenizer_file

GPT2 = {"model_type": "gpt2", "attn_pdrop": 0.0}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
EXPECTED = llama.Config(
    num_layers=2, embed_dim=64, num_heads=8, num_kv_heads=8, head_dim=8, mlp_dim=128,
    vocab_size=1000, max_seq_len=512, rope_theta=1e4, eps=1e-6,
)  # fmt: skip
STRETCH = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SCALING = llama.RopeScaling(
    factor=8.0, original_seq_len=256, low_freq_factor=1.0, high_freq_factor=4.0
)


def read(folder: Path, entries: dict[str, Any], **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(entries))
    return hf.read_config(folder, **options)


def error_of(folder: Path, entries: dict[str, Any], **options: Any) -> str:
    with pytest.raises(WeightsError) as error:
        read(folder, entries, **options)
    return str(error.value).replace(str(folder), "FOLDER")


def test_what_is_not_said_is_as_in_transformers(tmp_path: Path) -> None:
    assert read(tmp_path, GPT2) == replace(gpt.GPT2, dropout=0.1)
    assert read(tmp_path, LLAMA) == EXPECTED
    qwen = QWEN3 | {"num_attention_heads": 32}
    qwen2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
    assert read(tmp_path, qwen2) == replace(EXPECTED, qkv_bias=True, num_kv_heads=2)
    assert read(tmp_path, qwen) == replace(
        EXPECTED, qk_norm=True, head_dim=128, num_heads=32, num_kv_heads=32
    )
    transformers = pytest.importorskip("transformers")
    assert transformers.GPT2Config().to_dict()["n_inner"] is None
    for entries in (LLAMA, qwen2, qwen, qwen | {"num_key_value_heads": None}):
        theirs = transformers.AutoConfig.for_model(**entries).to_dict()
        assert read(tmp_path, theirs) == read(tmp_path, entries)
    theirs = transformers.GPT2Config(attn_pdrop=0.0).to_dict()
    assert read(tmp_path, theirs) == read(tmp_path, GPT2)


# The published entries, of which many say nothing about the model.
PUBLISHED_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
PUBLISHED_LLAMA3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
PUBLISHED_QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_configs_are_the_presets(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="attn_pdrop"):
        assert read(tmp_path, PUBLISHED_GPT2) == replace(gpt.GPT2, dropout=0.1)
    scaling = replace(SCALING, original_seq_len=8192)
    expected = replace(
        llama.LLAMA3_8B, max_seq_len=131072, rope_scaling=scaling, dtype=torch.bfloat16
    )
    assert read(tmp_path, PUBLISHED_LLAMA3_1_8B) == expected
    assert read(tmp_path, PUBLISHED_QWEN3_0_6B) == replace(llama.QWEN3_0_6B, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("entries", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": STRETCH | {"rope_type": "llama3"}}, 5e5, SCALING),
        ({"rope_theta": 5e5, "rope_scaling": STRETCH | {"type": "llama3"}}, 5e5, SCALING),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_parameters": STRETCH | {"rope_theta": 5e5, "rope_type": "llama3"}}, 5e5, SCALING),
        ({}, 1e4, None),
    ],
)
def test_rotary_entries_of_all_versions(
    entries: dict[str, Any], theta: float, scaling: Any, tmp_path: Path
) -> None:
    expected = replace(EXPECTED, rope_theta=theta, rope_scaling=scaling)
    assert read(tmp_path, LLAMA | entries) == expected
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**LLAMA, **entries)
    assert theirs.rope_parameters["rope_theta"] == theta
    assert (theirs.rope_parameters["rope_type"] == "llama3") == (scaling is not None)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu', 'swish'"),
        ({"attention_bias": True}, "attention_bias = True; supported: False"),
        ({"attention_bias": 0}, "attention_bias = 0; supported: False"),
        ({"mlp_bias": True}, "mlp_bias = True; supported: False"),
        ({"use_sliding_window": True}, "use_sliding_window = True; supported: False"),
        ({"sliding_window": 4096}, "sliding_window = 4096; supported: null"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention; supported: full_attention",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "the rope type 'yarn'; supported: 'default', 'llama3'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "the rope type 'linear'; supported: 'default', 'llama3'",
        ),
        (
            {
                "rope_scaling": {k: v for k, v in STRETCH.items() if k != "factor"}
                | {"type": "llama3"}
            },
            "rope_scaling.factor is missing",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5; supported: 1.0, 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "beta": 2}},
            "rope_parameters.beta = 2 is unknown",
        ),
        ({"rope_scaling": 3}, "rope_scaling = 3; it must be an object"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "default"}},
            "rope_parameters and rope_scaling are both there; one is needed",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config = {'bits': 4}; supported: null",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures has 'LlamaForSequenceClassification'; supported: 'LlamaForCausalLM'",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; it must be an integer of at least 1"),
        (
            {"num_hidden_layers": True},
            "num_hidden_layers = True; it must be an integer of at least 1",
        ),
        ({"vocab_size": "1000"}, "vocab_size = '1000'; it must be an integer of at least 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0; it must be a number above 0"),
        ({"rope_theta": 1e400}, "rope_theta = inf; it must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; it must be true or false"),
        ({"torch_dtype": "int8"}, "dtype = 'int8'; it must be float64, float32, float16, bfloat16"),
        (
            {"attention_dropout": 1.5},
            "attention_dropout = 1.5; it must be a number from 0 to below 1",
        ),
        ({"num_experts": 8}, "num_experts = 8 is unknown"),
        ({"num_key_value_heads": 3}, "llama.Config: num_heads is not a multiple of num_kv_heads."),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    lines = error_of(tmp_path, LLAMA | changes).splitlines()
    assert lines[0] == "FOLDER/config.json: is not of a model that can be read."
    assert lines[1] == f"  {line}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"activation_function": "relu"},
            "activation_function = 'relu'; supported: 'gelu_new', 'gelu_pytorch_tanh'",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False; supported: True"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False; supported: True"),
        ({"add_cross_attention": True}, "add_cross_attention = True; supported: False"),
        ({"embd_pdrop": 0.2}, "embd_pdrop = 0.2, resid_pdrop = 0.1; one rate is needed"),
        ({"hidden_size": 5}, "hidden_size = 5 is unknown"),
    ],
)
def test_what_gpt2_does_not_support(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, GPT2 | changes).splitlines()[1] == f"  {line}"


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    entries = QWEN3 | {"hidden_act": "gelu", "speed": 1, "rope_parameters": {"warp": 2}}
    del entries["vocab_size"]
    assert error_of(tmp_path, entries) == (
        "FOLDER/config.json: is not of a model that can be read.\n"
        "  vocab_size is missing\n"
        "  hidden_act = 'gelu'; supported: 'silu', 'swish'\n"
        "  speed = 1 is unknown\n"
        "  rope_parameters.warp = 2 is unknown\n"
        "  fix: ignore=('speed', 'rope_parameters.warp') if that changes nothing in the model"
    )


def test_what_changes_nothing_can_be_ignored(tmp_path: Path) -> None:
    entries = LLAMA | {"speed": 1}
    assert "fix: ignore=('speed',) if" in error_of(tmp_path, entries)
    assert read(tmp_path, entries, ignore=["speed"]) == EXPECTED


def test_other_families_are_refused(tmp_path: Path) -> None:
    for kind in ("mixtral", None, ["llama"]):
        assert error_of(tmp_path, {"model_type": kind}) == (
            "FOLDER/config.json: is of another family.\n"
            f"  model_type = {kind!r}; supported: 'gpt2', 'llama', 'qwen2', 'qwen3'"
        )


def test_dropout_that_the_models_do_not_have_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"attention_dropout = 0\.1 of config\.json is left out"):
        assert read(tmp_path, LLAMA | {"attention_dropout": 0.1}) == EXPECTED
    with pytest.warns(UserWarning, match=r"attn_pdrop = 0\.1 of config\.json is left out"):
        assert read(tmp_path, {"model_type": "gpt2"}).dropout == 0.1


def test_a_config_comes_back(tmp_path: Path) -> None:
    stretched = replace(EXPECTED, rope_scaling=SCALING, tied=True, num_kv_heads=2, init_std=0.01)
    for number, config in enumerate([
        replace(gpt.GPT2, num_layers=1, embed_dim=12, mlp_dim=7, vocab_size=5, dropout=0.3),
        stretched, replace(stretched, qk_norm=True, head_dim=2, dtype=torch.bfloat16),
    ]):  # fmt: skip
        params = hf.family_of(config).init(config, pfx.random.key(0))
        hf.save(tmp_path / str(number), params, config)
        assert hf.read_config(tmp_path / str(number)) == config


def test_a_model_that_transformers_does_not_have(tmp_path: Path) -> None:
    config = replace(EXPECTED, qk_norm=True, qkv_bias=True)
    with pytest.raises(WeightsError, match="qk_norm and qkv_bias are both there"):
        hf.save(tmp_path / "out", llama.init(config, pfx.random.key(0)), config)


def test_further_entries_and_the_tokenizer_go_along(tmp_path: Path) -> None:
    config = replace(EXPECTED, num_layers=1)
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "from" / "secret.txt").write_text("mine")
    params = llama.init(config, pfx.random.key(0))
    hf.save(
        tmp_path / "out", params, config, extra={"eos_token_id": 7}, tokenizer=tmp_path / "from"
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    assert hf.read_config(tmp_path / "out") == config
    assert tokenizer_file(tmp_path / "out").read_text() == '{"version": "1.0"}'
    assert not (tmp_path / "out" / "secret.txt").exists()


# The tokenizer's files


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        tokenizer_file(tmp_path)


@pytest.mark.parametrize(
    ("found", "template"),
    [
        (None, None),
        ("{{ messages }}", "{{ messages }}"),
        (
            [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}],
            "b",
        ),
    ],
)
def test_chat_templates(found: Any, template: str | None, tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    assert chat_template(tmp_path) == template
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert chat_template(tmp_path) == "from its own file"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            [{"name": "rag", "template": "a"}],
            "has the chat templates 'rag', and none is the default.",
        ),
        (3, "has a chat_template that is a int, not a string."),
    ],
)
def test_chat_templates_that_are_none(found: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    with pytest.raises(WeightsError) as error:
        chat_template(tmp_path)
    assert str(error.value) == f"{tmp_path}/tokenizer_config.json: {text}"


def test_special_tokens(tmp_path: Path) -> None:
    assert special_tokens(tmp_path) == {}
    entries = {
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None,
        "add_bos_token": True, "model_max_length": 10,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
