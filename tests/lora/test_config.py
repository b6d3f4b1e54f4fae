"""Which modules a config selects: the answers of peft 0.21 (`check_target_module_exists`)."""

from __future__ import annotations

import json

import pytest

from kvasir.lora.config import read_config
from kvasir.lora.patterns import Budget

LAYERS = [0, 1, 11]
NAMES = [f"model.layers.{i}.{part}" for i in LAYERS for part in ("self_attn.q_proj", "mlp.experts.1.up_proj")]
NAMES += ["lm_head", "q_proj", "layers.0.q_proj", "h.2.q_proj"]
Q, UP = NAMES[0:6:2], NAMES[1:6:2]
SELECTED = [
    ({"target_modules": ["q_proj"]}, [*Q, *NAMES[7:]]),
    ({"target_modules": ["_proj"]}, []),
    ({"target_modules": []}, []),
    ({"target_modules": [Q[1], "experts.1.up_proj"]}, [UP[0], Q[1], UP[1], UP[2]]),
    ({"target_modules": r".*\.(q|k)_proj"}, [*Q, *NAMES[8:]]),
    ({"target_modules": "q_proj"}, ["q_proj"]),
    ({"target_modules": "^(?!.*mlp).*layers.*proj$"}, [*Q, "layers.0.q_proj"]),
    ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"}, [Q[0], Q[2], *NAMES[7:]]),
    ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, NAMES[7:]),
    ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "self_attn"]}, NAMES[7:]),
    ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1}, [Q[1], UP[1], "q_proj"]),
    ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [11, 2]}, [Q[2], UP[2], "q_proj"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": ["x", "h"]}, ["q_proj", "h.2.q_proj"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
     [Q[0], "q_proj", "layers.0.q_proj"]),
    ({"target_modules": ["up_proj"], "layers_to_transform": 1, "layers_pattern": ""}, [UP[1]]),
    ({"target_modules": ["up_proj"], "layers_to_transform": [], "layers_pattern": "h"}, UP),
]  # fmt: skip


@pytest.mark.parametrize(("config", "selected"), SELECTED)
def test_selected_modules(tmp_path, config, selected):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **config}))
    read = read_config(path)
    assert [name for name in NAMES if read.selects(name, Budget())] == selected
