"""models.py TINY_DIR MOE_DIR: write a tiny Llama and a tiny Mixtral with a byte-level tokenizer; weights are dummies.

Run by the python of the vLLM installation, so that its own transformers writes files that it can read. No download.
"""

from __future__ import annotations

import json
import pathlib
import sys

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
}


def main() -> None:
    """Write both directories."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    ids = {f"{name}_token_id": fast.convert_tokens_to_ids(t) for name, t in (("bos", "<s>"), ("eos", "</s>"))}
    for directory, config in ((sys.argv[1], LLAMA | ids), (sys.argv[2], LLAMA | ids | MIXTRAL)):
        path = pathlib.Path(directory)
        path.mkdir(parents=True)
        fast.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


main()
