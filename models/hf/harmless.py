"""Entries of a config.json that are of no consequence for what a model computes."""

from __future__ import annotations

from pfx.interop.hf import Fields

HARMLESS = (
    *("_name_or_path", "transformers_version", "tokenizer_class", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("id2label", "label2id", "finetuning_task", "problem_type", "task_specific_params"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("chunk_size_feed_forward", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("return_dict", "output_hidden_states", "output_attentions", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values", "is_decoder", "tie_encoder_decoder"),
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups"),
    *("max_length", "min_length", "max_new_tokens", "early_stopping", "num_return_sequences"),
    *("repetition_penalty", "length_penalty", "diversity_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "bad_words_ids"),
    *("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "prefix"),
    *("suppress_tokens", "begin_suppress_tokens", "cross_attention_hidden_size"),
)


def check_common(fields: Fields, family: str) -> None:
    """Take the entries that every config has, and refuse another kind of model of this family."""
    fields.take("model_type", None)
    heads = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    for name in fields.take("architectures", None) or []:
        if name not in (heads, f"{family}Model"):
            fields.problems.append(f"architectures has {name!r}; supported: {heads!r}")
    fields.expect("quantization_config", [])
    fields.expect("is_encoder_decoder", [False])
    fields.expect("pruned_heads", [{}])
