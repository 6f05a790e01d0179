"""Writes optimizers.json: what PyTorch's optimizers make of a few parameters in five steps with given gradients.

Run with PyTorch 2.9 or later: python optimizers.py > optimizers.json
Muon's iteration is computed in f32 instead of bf16, as the engine does.
"""

import json
import math

import torch

SHAPES = {"blocks.w": [6, 4], "blocks.wide": [3, 7], "blocks.b": [5], "blocks.deep": [2, 3, 4], "blocks.one": [1]}
STEPS, LR = 5, 0.02


def values(count, salt):
    return [math.sin(0.61 * i + 1.7 * salt) * (1 + 0.3 * math.cos(2.3 * i)) for i in range(count)]


def run(make):
    params = {
        name: torch.nn.Parameter(torch.tensor(values(math.prod(shape), salt)).reshape(shape))
        for salt, (name, shape) in enumerate(SHAPES.items())
    }
    optimizers = make(params)
    for step in range(STEPS):
        for salt, (name, param) in enumerate(params.items()):
            param.grad = torch.tensor(values(param.numel(), 10 + 7 * step + salt)).reshape(param.shape)
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.flatten().tolist() for name, param in params.items()}


def every(kind, **settings):
    return lambda params: [kind(params.values(), lr=LR, **settings)]


def muon(adjust):
    def make(params):
        matrices = [p for p in params.values() if p.ndim == 2]
        rest = [p for p in params.values() if p.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn=adjust),
            torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
        ]

    return make


torch.bfloat16 = torch.float32
optim = torch.optim
cases = {
    "adamw": every(optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1),
    "adam": every(optim.Adam, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": every(optim.SGD, weight_decay=0.1),
    "momentum": every(optim.SGD, momentum=0.9, weight_decay=0.1),
    "nesterov": every(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": every(optim.Adafactor, weight_decay=0.1),
    "muon": muon("original"),
    "muon_adamw_scale": muon("match_rms_adamw"),
}
out = {
    "shapes": list(SHAPES.items()),
    "lr": LR,
    "initial": {name: values(math.prod(shape), salt) for salt, (name, shape) in enumerate(SHAPES.items())},
    "gradients": [
        {name: values(math.prod(shape), 10 + 7 * step + salt) for salt, (name, shape) in enumerate(SHAPES.items())}
        for step in range(STEPS)
    ],
    "final": {name: run(make) for name, make in cases.items()},
}
print(json.dumps(out))
