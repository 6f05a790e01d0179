"""Makes the models of this folder, and their logits in float64, with PyTorch and transformers (5.24).

Each differs from the fixtures in what its name says. Weights are random and large, so that every term matters.
"""

import json
import pathlib
import shutil

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
GPT2 = dict(vocab_size=29, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
LLAMA = dict(
    vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=24, bos_token_id=None, eos_token_id=None,
)


def save(name, model, dtype=torch.float32, saved=None, edit=None):
    torch.manual_seed(len(name))
    for parameter in model.parameters():
        offset = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0
        parameter.data = (offset + 0.3 * torch.randn_like(parameter)).to(dtype)
    model.tie_weights()
    model.eval()
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    (saved or (lambda m: m))(model).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if edit:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ids = torch.randint(0, 29, (2, 24))
    with torch.no_grad():
        logits = model.double()(ids).logits
    rounded = [[[round(x, 7) for x in row] for row in sample] for sample in logits.tolist()]
    (folder / "logits.json").write_text(json.dumps({"ids": ids.tolist(), "logits": rounded}) + "\n")


def old_rope(config):
    """The form of releases before 5."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")


torch.set_default_dtype(torch.float32)
inner = GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False, activation_function="gelu_pytorch_tanh",
                   layer_norm_epsilon=1e-3)
save("gpt2-untied-inner", GPT2LMHeadModel(inner))
save("gpt2-without-prefix", GPT2LMHeadModel(GPT2Config(**GPT2)), saved=lambda model: model.transformer)
rope = {"rope_type": "default", "rope_theta": 500000.0}
tied = LlamaConfig(**LLAMA, num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, rope_parameters=rope)
save("llama-tied-one-key-head", LlamaForCausalLM(tied))
grouped = LlamaConfig(**LLAMA, num_key_value_heads=2, rms_norm_eps=1e-3, rope_parameters=dict(rope, rope_theta=100.0))
save("llama-bf16-old-rope", LlamaForCausalLM(grouped), dtype=torch.bfloat16, edit=old_rope)
